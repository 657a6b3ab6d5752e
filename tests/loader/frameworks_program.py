"""Run by test_frameworks.py, alone and under torchrun: the recipes of docs/frameworks.md, and what
the frameworks would do by default. Each rank writes what it saw to a file of its own."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from fsmount_loader import ShardDataset, ShardLoader

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
SEEN: list[list[int]] = []  # the samples of each batch that the network got


def record(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    if isinstance(module, torch.nn.Linear):
        SEEN.append(args[0][:, 0].long().tolist())


def seen(step: Callable[..., object], *args: object, **options: object) -> list[list[int]]:
    SEEN.clear()
    step(*args, **options)
    return SEEN.copy()


def refusal(step: Callable[[], object]) -> str:
    try:
        return f"no error: {step()}"
    except Exception as error:  # noqa: BLE001 - whatever is raised is what is asked for
        return f"{type(error).__name__}: {error}"


def lightning_runs(recipes: dict[str, Any], out: Path, ranks: int) -> dict[str, Any]:
    def train(name: str, checkpoint: Path | None = None) -> list[list[int]]:
        keep = [
            ModelCheckpoint(out / name, "{step}", every_n_train_steps=1, save_top_k=-1),
            ModelCheckpoint(out / name, "end-{epoch}", every_n_epochs=1, save_top_k=-1,
                            save_on_train_epoch_end=True),
        ]  # fmt: skip
        return seen(
            recipes["train_with_lightning"], checkpoint, callbacks=keep, accelerator="cpu",
            devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False,
            reload_dataloaders_every_n_epochs=int(checkpoint is None),
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    return {
        "whole": train("whole"),
        "middle": train("middle", out / "whole" / "step=2.ckpt"),
        "end": train("end", out / "whole" / "end-epoch=0.ckpt"),
    }


def accelerate_runs(recipes: dict[str, Any], out: Path, ranks: int) -> dict[str, Any]:
    def train(checkpoint: Path | None = None) -> list[list[int]]:
        return seen(recipes["train_with_accelerate"], out, checkpoint, save_every=2)

    return {
        "whole": train(),
        "middle": train(out / f"0-{2 * 2 * ranks}"),
        "end": train(out / "0-16"),
    }


def transformers_runs(root: str, recipes: dict[str, Any], out: Path, ranks: int) -> dict[str, Any]:
    options = {"save_steps": 2, "use_cpu": True, "disable_tqdm": True}

    def train(name: str, checkpoint: Path | None = None) -> list[list[int]]:
        step = recipes["train_with_transformers"]
        return seen(step, str(out / name), checkpoint and str(checkpoint), **options)

    def train_and_skip(root: str, checkpoint: Path) -> None:
        args = TrainingArguments(str(out / "twice"), report_to="none", **options)
        loader = ShardLoader(ShardDataset(root, batch_size=2))
        trainer = recipes["StreamTrainer"](recipes["Network"](), args, loader=loader)
        trainer.train(resume_from_checkpoint=str(checkpoint))

    whole = out / "whole"
    return {
        "whole": train("whole"),
        "middle": train("middle", whole / "checkpoint-2"),
        "end": train("end", whole / f"checkpoint-{8 // ranks}"),
        "skipping": refusal(lambda: train_and_skip(root, whole / "checkpoint-2")),
    }


def defaults(root: str, out: Path, recipes: dict[str, Any]) -> dict[str, str]:
    """What a DataLoader over our dataset comes to in Accelerate and in a plain Trainer."""

    data = ShardDataset(root, batch_size=2)

    def prepared(**options: Any) -> Any:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
        return accelerator.prepare(DataLoader(data, batch_size=None))

    def trained() -> None:
        args = TrainingArguments(str(out), max_steps=1, use_cpu=True, report_to="none")
        Trainer(recipes["Network"](), args, train_dataset=data).train()

    plain, ours = DataLoader(data, batch_size=None), ShardLoader(data)
    kept = prepared()
    return {
        "prepared": refusal(lambda: list(kept)),
        "prepared, not dispatched": refusal(lambda: list(prepared(dispatch_batches=False))),
        "skipped": refusal(lambda: list(skip_first_batches(plain, 1))),
        "skipped in a worker": refusal(
            lambda: list(skip_first_batches(DataLoader(data, batch_size=None, num_workers=1), 1))
        ),
        "train_dataset": refusal(trained),
        "ours skipped": refusal(lambda: list(skip_first_batches(ours, 1))),
        "ours prepared": f"{Accelerator().prepare(ours) is ours}",
        "afterwards": f"{len(list(plain))} batches",
    }


def main() -> None:
    root, out = sys.argv[1], Path(sys.argv[2])
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    recipes: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec("\n".join(blocks).replace("/mnt/ds", root), recipes)  # noqa: S102 - our own page
    torch.nn.modules.module.register_module_forward_pre_hook(record)
    Accelerator(cpu=True)  # initialises torch.distributed
    data = ShardDataset(root, batch_size=2)
    results = {
        "plain": [batch["x"][:, 0].long().tolist() for _ in range(2) for batch in data],
        "accelerate": accelerate_runs(recipes, out / "accelerate", ranks),
        "transformers": transformers_runs(root, recipes, out / "transformers", ranks),
        "lightning": lightning_runs(recipes, out / "lightning", ranks),
        "defaults": defaults(root, out / "defaults", recipes),
    }
    (out / f"{rank}.json").write_text(json.dumps(results))
    Accelerator().wait_for_everyone()
    os._exit(0)  # as rank_program.py


if __name__ == "__main__":
    main()
