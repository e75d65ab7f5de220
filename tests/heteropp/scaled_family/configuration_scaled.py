"""A family that transformers does not have, as somebody would write it: its config."""

from transformers import PretrainedConfig


class ScaledConfig(PretrainedConfig):
    model_type = "scaled"

    def __init__(
        self,
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        norm_scale=1.0,
        attention_dropout=0.0,
        has_tp_plan=True,
        layers_give_tuples=False,
        tie_word_embeddings=False,
        **others,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.norm_scale = norm_scale
        self.attention_dropout = attention_dropout
        self.has_tp_plan = has_tp_plan
        self.layers_give_tuples = layers_give_tuples
        if has_tp_plan:
            self.base_model_tp_plan = {
                "layers.*.attention.q_proj": "colwise",
                "layers.*.attention.k_proj": "colwise",
                "layers.*.attention.v_proj": "colwise",
                "layers.*.attention.o_proj": "rowwise",
                "layers.*.up_proj": "colwise",
                "layers.*.down_proj": "rowwise",
            }
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)
