"""Where each suite has its tests, and how it is told the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    name: str
    default: tuple[str, ...]  # files that run when none is named, relative to the source
    needs: str  # a path that tells a source folder of this suite

    def environment(self, device_type: str, folder: Path) -> dict[str, str]:
        """What makes the suite use the device; it runs in `folder`, which links to its source."""
        if self.name == "pytorch":
            only = "cpu" if device_type == "cpu" else "privateuse1"
            return {"PYTORCH_TESTING_DEVICE_ONLY_FOR": only}
        if self.name == "transformers":
            return _transformers(device_type, folder)
        if self.name == "accelerate":
            return {"ACCELERATE_TORCH_DEVICE": device_type} if device_type != "cpu" else {}
        return {}


def _transformers(device_type: str, folder: Path) -> dict[str, str]:
    if device_type == "cpu":
        return {"TRANSFORMERS_TEST_DEVICE": "cpu"}
    spec = folder / "device_spec.py"
    spec.write_text(
        "import torch\nimport ditorch\n"
        f"DEVICE_NAME = {device_type!r}\n"
        "MANUAL_SEED_FN = torch.manual_seed\n"
        f"EMPTY_CACHE_FN = torch.{device_type}.empty_cache\n"
        f"DEVICE_COUNT_FN = torch.{device_type}.device_count\n"
    )
    return {"TRANSFORMERS_TEST_DEVICE": device_type, "TRANSFORMERS_TEST_DEVICE_SPEC": spec.name}


SUITES = {
    suite.name: suite
    for suite in (
        Suite("pytorch", ("test/test_view_ops.py", "test/test_torch.py"), "test"),
        Suite(
            "transformers",
            tuple(
                f"tests/models/{model}/test_modeling_{model}.py"
                for model in ("llama", "qwen3_moe", "gpt2")
            ),
            "tests",
        ),
        Suite("accelerate", ("tests/test_accelerator.py", "tests/test_utils.py"), "tests"),
        Suite("peft", ("tests/test_custom_models.py",), "tests"),
    )
}
