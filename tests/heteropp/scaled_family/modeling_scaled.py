"""The same family's model, whose norms have a scale."""

from typing import ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_scaled import ScaledConfig


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **_):
    key = key.repeat_interleave(module.num_key_value_groups, 1)
    value = value.repeat_interleave(module.num_key_value_groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ScaledRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6, scale=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.scale = scale

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.scale * self.weight * (x * torch.rsqrt(variance + self.eps))


class ScaledAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        kv = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, **others):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, **others)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1))


class ScaledLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.gives_tuple = config.layers_give_tuples  # as in transformers 4
        self.attention = ScaledAttention(config, layer_idx)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.attention_norm = ScaledRMSNorm(config.hidden_size, scale=config.norm_scale)
        self.mlp_norm = ScaledRMSNorm(config.hidden_size, scale=config.norm_scale)

    def forward(self, hidden_states, attention_mask=None, **others):
        hidden_states = hidden_states + self.attention(
            self.attention_norm(hidden_states), attention_mask=attention_mask, **others
        )
        wide = self.up_proj(self.mlp_norm(hidden_states))
        hidden_states = hidden_states + self.down_proj(nn.functional.silu(wide))
        return (hidden_states,) if self.gives_tuple else hidden_states


class ScaledPreTrainedModel(PreTrainedModel):
    config_class = ScaledConfig
    base_model_prefix = "model"


class ScaledModel(ScaledPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(ScaledLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = ScaledRMSNorm(config.hidden_size, scale=config.norm_scale)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        use_cache=None,
        **others,
    ):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        hidden_states = inputs_embeds
        for layer in self.layers:
            found = layer(hidden_states, attention_mask=mask)
            hidden_states = found[0] if self.config.layers_give_tuples else found
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class ScaledForCausalLM(ScaledPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **others):
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **others)
        return CausalLMOutputWithPast(logits=self.lm_head(found.last_hidden_state))
