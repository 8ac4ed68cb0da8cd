"""``oomguard validate``: predicted beside measured."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oomguard.cli.options import refuse_beside, wants_colour
from oomguard.cli.waiting import waiting
from oomguard.errors import InputError
from oomguard.estimate.coefficients import Coefficients, read_coefficients, shipped
from oomguard.rows import Row, read_rows, shipped_row_files, usable


@click.command("validate", short_help="Predicted beside measured, for every shipped row.")
@click.option("--backend", type=click.Choice(["cpu", "metal"]), help="Only this backend's rows.")
@click.option(
    "--rows",
    "rows_file",
    type=click.Path(path_type=Path),
    help="Measured rows of your own instead: a row file, or what measure --json printed.",
)
@click.option(
    "--coefficients",
    "coefficients_file",
    type=click.Path(path_type=Path),
    help="A coefficients file of your own.",
)
@click.option(
    "--engine",
    type=click.Choice(["estimate", "trace"]),
    default="estimate",
    show_default=True,
    help="trace simulates every row's step, and more rows; it takes minutes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, schema oomguard.validation/1.")
def command(
    backend: str | None,
    rows_file: Path | None,
    coefficients_file: Path | None,
    engine: str,
    as_json: bool,
) -> int:
    """Print what is predicted beside what was measured, for every shipped row, with
    the median and worst error and the bounds they must keep.

    "leave-one-out" predicts each row by a fit that never saw it. Exit status 1
    when a bound is missed.
    """
    if engine == "trace":
        refuse_beside(("coefficients_file",), "--engine trace simulates and fits nothing")
        return _trace(backend, rows_file, as_json)
    from oomguard.estimate.validate import validate
    from oomguard.report.validate_text import validation_json, validation_text

    validations = [
        validate(coefficients, rows)
        for coefficients, rows in _what_to_hold(backend, rows_file, coefficients_file)
    ]
    if as_json:
        click.echo(json.dumps(validation_json(validations), indent=2))
    else:
        click.echo("\n\n".join(validation_text(validation, wants_colour()) for validation in validations))
    return 1 if any(validation.problems for validation in validations) else 0


def _trace(backend: str | None, rows_file: Path | None, as_json: bool) -> int:
    """Every measured row beside its trace, a section at a time."""
    from oomguard.calibration.trace_check import check_all
    from oomguard.report.trace_check_text import section_text, sections_json

    own = None
    if rows_file is not None:
        if backend == "metal":
            refuse_beside(
                ("rows_file",), "--backend metal traces the shipped rows; rows of your own are the CPU's"
            )
        own = [row for row in read_rows(rows_file)[1] if row.backend == "cpu"]
        if not own:
            raise InputError(
                f"{rows_file} holds no rows measured on the cpu, which --engine trace simulates here"
            )
    backends = (backend,) if backend else ("cpu",) if own else ("cpu", "metal")
    sections = []
    coming = check_all(backends, own)
    while True:
        with waiting("simulating the step of every row"):
            section = next(coming, None)
        if section is None:
            break
        sections.append(section)
        if not as_json:
            click.echo(section_text(section, wants_colour()) + "\n")
    if as_json:
        click.echo(json.dumps(sections_json(sections), indent=2))
    return 1 if any(section.problems for section in sections) else 0


def _what_to_hold(
    backend: str | None, rows_file: Path | None, coefficients_file: Path | None
) -> list[tuple[Coefficients, list[Row]]]:
    own = None if coefficients_file is None else read_coefficients(coefficients_file)
    found = []
    for path in [rows_file] if rows_file else shipped_row_files():
        rows = [row for row in usable(read_rows(path)[1]) if row.model and row.step and row.peak_bytes]
        for name in sorted({row.backend for row in rows}):
            if {name} == {name, backend or name, own.backend if own else name}:
                found.append((own or shipped(name), [row for row in rows if row.backend == name]))
    if not found:
        wanted = " and ".join(sorted({backend or "", own.backend if own else ""} - {""}))
        where = f"{rows_file} holds" if rows_file else "there are"
        raise InputError(f"{where} no measured {wanted + ' ' if wanted else ''}rows of the preset GPT")
    return found
