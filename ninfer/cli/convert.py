"""`ninfer convert`: a model directory as one .ninfer file, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ninfer.cli.console import Console
from ninfer.cli.exit_codes import ExitCode
from ninfer.cli.loading import open_named_model
from ninfer.cli.output_files import check_writable
from ninfer.cli.parser import Invocation
from ninfer.cli.progress import ProgressLine
from ninfer.contract.errors import OptionError
from ninfer.convert.writer import write_artifact
from ninfer.options import ConvertOptions


def run(invocation: Invocation, console: Console) -> ExitCode:
    options = invocation.read(ConvertOptions)
    out = _out_path(options)
    source = open_named_model(invocation.model_path)
    with ProgressLine(console, "writing") as line:
        write_artifact(source, out, progress=lambda done, total: line(out.name, done, total))
    console.write(f"{out}: {out.stat().st_size / 1e6:.1f} MB from {source.path}\n")
    return ExitCode.OK


def _out_path(options: ConvertOptions) -> Path:
    if options.out is None:
        raise OptionError("--out", "the file to write is needed")
    path = Path(options.out)
    if path.suffix != ".ninfer":
        raise OptionError("--out", f"{path} does not end in .ninfer")
    check_writable("--out", path)
    if path.exists() and not options.force:
        raise OptionError("--out", f"{path} exists (--force replaces it)")
    return path
