"""transformers' Trainer, with peft where asked for: nothing in it names a device."""

import json
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TextGenerationPipeline, Trainer
from transformers import TrainingArguments as Arguments

import ditorch

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)
model = LlamaForCausalLM(config)
if "peft" in sys.argv:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=True))
rows = [{"input_ids": (torch.arange(8) * i) % 64, "labels": torch.arange(8)} for i in range(8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = Arguments(
        folder, max_steps=3, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        logging_steps=1, learning_rate=1e-2, save_steps=3, bf16="bf16" in sys.argv,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate(rows)["eval_loss"])
    if "peft" in sys.argv:
        model.save_pretrained(folder)
        model = PeftModel.from_pretrained(LlamaForCausalLM(config), folder)
    on = {str(trainer.args.device), str(trainer.accelerator.device), str(trainer.model.device)}
pipeline = TextGenerationPipeline(LlamaForCausalLM(config), tokenizer=None)
on.add(str(pipeline.device))
print(json.dumps([sorted(on), losses, str(ditorch.device)]))
