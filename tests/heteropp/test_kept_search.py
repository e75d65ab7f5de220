"""What a search computes with torch and transformers is kept: the next one imports neither."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"matplotlib", "numpy", "torch", "transformers"}
MIXTRAL = {
    "model_type": "mixtral",
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    **{"max_position_embeddings": 64, "num_experts_per_tok": 2, "dtype": "float32"},
}


@pytest.mark.parametrize(
    "family", ["our own", pytest.param("of transformers", marks=pytest.mark.long)]
)
def test_a_search_asks_torch_and_transformers_once(family: str, tmp_path: Path) -> None:
    model = "quickstart"
    if family == "of transformers":
        model = str(tmp_path / "mixtral")
        Path(model).mkdir()
        (Path(model) / "config.json").write_text(json.dumps(MIXTRAL))
    assert "torch" in search(model, tmp_path / "first.json", tmp_path)
    assert not search(model, tmp_path / "second.json", tmp_path) & SLOW
    assert (tmp_path / "second.json").read_bytes() == (tmp_path / "first.json").read_bytes()


def search(model: str, output: Path, cache: Path) -> set[str]:
    """Searches with a cache folder, and returns the packages that were imported for it."""
    done = subprocess.run(
        [
            *(sys.executable, "-X", "importtime", "-m", "heteropp.cli.search"),
            *("--cluster", "quickstart", "--model", model, "--global-batch", "16"),
            *("--planner", "exact", "--output", str(output)),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^import time:[^|]*\|[^|]*\| *(\S+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}
