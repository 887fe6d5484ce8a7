"""Import directions, and what starting the program may not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def test_imports_go_downwards_only() -> None:
    result = subprocess.run(
        [LINT_IMPORTS, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    for name in ("low", "high"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "low" / "__init__.py").write_text("import sample.high\n")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_package = "sample"\n'
        '[[tool.importlinter.contracts]]\nname = "layers"\ntype = "layers"\n'
        'layers = ["sample.high", "sample.low"]\n'
    )
    result = subprocess.run(
        [LINT_IMPORTS, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1, result.stdout + result.stderr


def test_importing_the_package_loads_no_device_library() -> None:
    code = (
        "import sys, ninfer.__main__, ninfer.engine.core, ninfer.gateway.app\n"
        "import ninfer.program.loader, ninfer.kernels.library\n"
        "print(sorted({'cupy', 'torch', 'cuda.bindings.driver'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
