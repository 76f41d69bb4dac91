"""Training with the Trainer, with a callback or without: `trainer_job.py WAY OUTPUT`.

WAY: `plain`, `callback`, `name` (report_to), `wrong` (a setting nobody knows), `fault` (rank 1
changes a weight on its own behind the first step), `raise` (a callback raises there).
"""

import hashlib
import sys

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from rankscope.integrations.transformers import RankscopeCallback, register


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Raise(TrainerCallback):
    def on_step_end(self, args, state, control, **_) -> None:
        raise ValueError("on purpose")


class Fault(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_) -> None:
        if state.global_step == 1 and args.process_index == 1:
            with torch.no_grad():
                model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.5)


def main() -> None:
    way, output = sys.argv[1:]
    set_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    register()
    arguments = TrainingArguments(
        output_dir=output, max_steps=3, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=2,
        report_to=["rankscope"] if way == "name" else [],
        per_device_eval_batch_size=4, save_strategy="no", disable_tqdm=True, seed=3,
        logging_strategy="no", ddp_find_unused_parameters=False,
    )  # fmt: skip
    callbacks = {
        "callback": [RankscopeCallback(steps="all")],
        "wrong": [RankscopeCallback(nothing="all")],
        "fault": [Fault(), RankscopeCallback(steps="all")],
        "raise": [RankscopeCallback(steps="all"), Raise()],
    }
    model = LlamaForCausalLM(config)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(24), eval_dataset=Tokens(8),
        callbacks=callbacks.get(way),
    )  # fmt: skip
    trainer.train()
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if trainer.is_world_process_zero():
        print("final", hashlib.sha256(bits).hexdigest(), random)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, RankscopeCallback):
                print("path", callback.path)
    # nothing of the group outlives it: its threads may abort an interpreter that is ending
    accelerator = trainer.accelerator
    accelerator.free_memory()
    del trainer, model
    accelerator.end_training()


if __name__ == "__main__":
    main()
