"""ditorch loaded by `import torch` itself, through the installed distribution's entry point."""

from __future__ import annotations

from pathlib import Path

from on_chip import ROOT, run_new_python

WHO = (
    "import torch, sys\n"
    "print('ditorch' in sys.modules)\n"
    "print(torch.ones(2, device='device').device if 'ditorch' in sys.modules else '-')\n"
)


def test_it_is_off_by_default() -> None:
    done = run_new_python(WHO, "b-mini")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "-"]


def test_import_torch_alone_gives_the_device() -> None:
    code = WHO + (
        "import ditorch\n"
        "print(ditorch.vendor(), torch.ones(2).cuda().device)\n"
        "(torch.ones(2, 2, device='cuda', requires_grad=True) * 2).sum().backward()\n"
    )
    done = run_new_python(code, "b-mini", DITORCH_AUTOLOAD="1", DITORCH_CUDA_COMPAT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "emuchip:0", "emuchip", "emuchip:0"]
    assert done.stderr == ""


def test_importing_ditorch_first_starts_it_once() -> None:
    code = "import ditorch\n" + WHO + "print(ditorch.device)\n"
    done = run_new_python(code, "b-mini", DITORCH_AUTOLOAD="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "emuchip:0", "emuchip:0"]


def test_a_failure_is_one_line_and_torch_works() -> None:
    code = "import torch; print(torch.ones(2).sum().item())"
    done = run_new_python(code, "b-maxi", DITORCH_AUTOLOAD="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ditorch: not loaded with torch (ImportError: DITORCH_CHIP is 'b-maxi'")


def test_a_ditorch_that_cannot_be_imported_does_not_break_torch(tmp_path: Path) -> None:
    (tmp_path / "ditorch").mkdir()
    (tmp_path / "ditorch" / "__init__.py").write_text("raise SystemError('half installed')\n")
    code = "import torch; print(torch.ones(2).sum().item())"
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1"}
    done = run_new_python(code, None, DITORCH_AUTOLOAD="1", **path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
    assert done.stderr.strip() == "ditorch: not loaded with torch (SystemError: half installed)"
