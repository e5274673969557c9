"""The verbs of the command `quarl`, one function each, named after it.

Exit codes: 0 success, 1 failure, 2 wrong use, 3 failed quality gate, 4 busy, 130 interrupted,
141 output closed.
"""

import atexit
import csv
import errno
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quarl_tf import environments, pipeline, presets
from quarl_tf.cli import arguments, doctor, summary
from quarl_tf.evaluation import shelf
from quarl_tf.evaluation.bench import bench
from quarl_tf.evaluation.blame import blame
from quarl_tf.export import boards, c_source
from quarl_tf.export.adopt import adopt
from quarl_tf.export.ptq import float_policy, quantize, require_source
from quarl_tf.foundation import provenance
from quarl_tf.foundation.display import progress_bar, spinner
from quarl_tf.foundation.errors import GateError, QuarlError, UsageError, one_line
from quarl_tf.foundation.files import read_json, require_writable, write_csv, write_json
from quarl_tf.presets import Preset, tables
from quarl_tf.runtime import flatbuffer
from quarl_tf.runtime.policy import Policy
from quarl_tf.spec import REFERENCE, Quantization, Scheme
from quarl_tf.spec.run import ADOPTED, Run, require_possible
from quarl_tf.spec.scheme import LISTED_SCHEMES
from quarl_tf.store import state
from quarl_tf.store.workspace import blame_path, evaluation_path, is_evaluated, report_name
from quarl_tf.study import State, Study, engine, plan, read, write_study_report
from quarl_tf.training import checkpoint


class _Console(Console):
    """A console that leaves closed pipes to `main`; Rich's would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


#: Where no terminal sets a width, it is wide enough for the tables.
_console = _Console(highlight=False, width=None if sys.stdout.isatty() else 130)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    # Python takes its own handler away before it ends, and Ctrl-C would hide the exit code.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        words = sys.argv[1:] if words is None else words
        parser = arguments.build()
        parsed, unknown_words = parser.parse_known_args(words)
        if unknown_words:
            raise UsageError(
                f"Unknown arguments. See: {' '.join(filter(None, ('quarl', parsed.verb)))} -h. "
                f"Received: {shlex.join(unknown_words)}"
            )
        if parsed.verb is None:
            parser.print_help()
            return 0
        if parsed.confident and parsed.gate is None:
            raise UsageError(
                "--confident says how --gate decides; add --gate PERCENT. Received: no --gate"
            )
        environments.import_environments(parsed.modules)
        parsed.command = shlex.join(["quarl", *words])
        _VERBS[parsed.verb](parsed)
    except QuarlError as error:
        _warn(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _warn("interrupted; the same command resumes.")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python would report that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        _warn(f"too little memory; give less to hold at once. Received: {one_line(error)}")
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:  # Of no file or full disk.
            raise
        _warn(
            f"A file or folder cannot be used ({error.strerror or error}); change its permissions, "
            "or work in another folder (--root DIR). "
            f"Received: path={str(error.filename or 'standard output')!r}"
        )
    else:
        return 0
    return 1


def _run(args: Namespace) -> None:
    run, preset = _requested_run(args)
    # fp32 is what all others are compared with.
    schemes = _schemes(args, run, reference=run.quantization is None)
    summary.require_gated(schemes, args)
    environments.require_chance(run.env_id, args.chance, run.algo)
    workspace = args.workspace
    if run.quantization is not None:
        _require_reference(args, run, preset)
    names_layers = any(Scheme.parse(scheme).single_layers for scheme in schemes)
    if names_layers and not state.is_trained(workspace, run.run_id):
        _check_network(run, preset, schemes)
    if is_kept := state.is_kept(workspace, run, preset):
        folder = workspace.artifact_dir(run.run_id)
        _say(f"kept      {folder}  (trained elsewhere; --root DIR trains it anew)")
    else:
        _train_one(args, run, preset)
    if args.dry_run:
        find = partial(state.state, episodes=args.episodes, chance=args.chance, current=True)
        statuses = {workspace.artifact(run.run_id, s): find(workspace, run, s) for s in schemes}
        for path, status in statuses.items():
            if status.sidecar is None or not (path.exists() or _stands(args, run, path)):
                if is_kept:
                    require_source(workspace, run, Scheme.parse(path.stem))
                _say(f"export   {path}")
        for path, status in statuses.items():
            if status.evaluation is None:
                _say(f"evaluate {evaluation_path(path, args.chance)}")
        if not args.no_report:
            _say(f"report   {workspace.report_dir(report_name(run.run_id, args.chance))}")
        return
    with workspace.working_on(run.run_id):
        artifacts = _export_and_evaluate(args, run, schemes)
    if not args.no_report:
        args.runs, args.name = [run.run_id], None
        _report(args)
    summary.require_gate(artifacts, args)


def _require_reference(args: Namespace, run: Run, preset: Preset) -> None:
    """Refuse a quantisation-aware training without a plain reference, or one of other settings."""
    workspace, plain = args.workspace, run.plain
    reference = state.state(workspace, plain, REFERENCE, chance=args.chance)
    if reference.sidecar is None:
        _check_network(run, preset)  # What cannot be quantised needs no reference.
        raise QuarlError(
            "A quantisation-aware training is compared with its plain reference, which comes "
            f"first: {workspace.command(plain.command('run'))}. "
            f"Received: {REFERENCE} of {plain.run_id!r} in {workspace.root.resolve()} "
            f"{reference.reason}"
        )
    if run.origin is None:
        folder = workspace.artifact_dir(plain.run_id)
        state.require_same_settings(folder, asdict(reference.sidecar), plain, preset)
        state.finished_training(workspace, plain, preset)  # Of the environment's code of today.


def _train(args: Namespace) -> None:
    _train_one(args, *_requested_run(args))


def _checkpoint_save(args: Namespace) -> None:
    if args.file.suffix != ".npz":
        raise UsageError(f"The name of the file ends in .npz. Received: file={str(args.file)!r}")
    run = checkpoint.save_to_go_on(args.workspace.run_dir(args.run), args.file)
    _say(f"saved     {args.file}  ({args.file.stat().st_size:,} bytes)")
    _say(f"resume by {args.workspace.command(run.command('train'))}")


def _export(args: Namespace) -> None:
    schemes = None if args.schemes is None else _schemes(args)
    is_file, in_c = _is_file(args.run), args.target == "c"
    if args.no_float and not in_c:
        raise UsageError("--no-float is for C; add --target c. Received: no C")
    if is_file and not in_c:
        raise UsageError(
            "A file is exported to C alone, a run to all schemes; add --target c, or give a "
            f"run id (quarl list). Received: run={args.run!r}"
        )
    if is_file and schemes is not None:
        raise UsageError(
            f"A file has its scheme; leave out --schemes. Received: --schemes {args.schemes}"
        )
    if in_c and not is_file and schemes is None:
        run = state.known_run(args.workspace, args.run)
        schemes = ["int8" if run.quantization is None else "qat_int8"]
    artifacts = _artifacts(args, [args.run]) if is_file else _export_all(args, args.run, schemes)
    for path in artifacts if in_c else ():
        size = c_source.write(path, fixed=args.no_float)
        _say(f"wrote     {path.with_suffix('.c')}  ({size})")


def _adopt(args: Namespace) -> None:
    if any(args.file.glob("saved_model.*")) and not args.trust:
        raise UsageError(
            "A SavedModel is a program, which runs when it is converted; give --trust if you trust "
            f"it. Received: {args.file}"
        )
    names, workspace = _schemes(args, reference=True), args.workspace
    summary.require_gated(names, args)
    with spinner("adopt"):
        run = adopt(
            workspace,
            args.file,
            args.env,
            args.head,
            schemes=[Scheme.parse(name) for name in names],
            name=args.name,
            seed=args.seed,
            modules=args.modules,
        )
    _say(f"adopted   {workspace.artifact_dir(run.run_id)}  (run {run.run_id})")
    summary.require_gate(_export_and_evaluate(args, run, names), args)


def _quantize(args: Namespace) -> None:
    (artifact,) = _artifacts(args, [args.artifact])
    scheme = Scheme.parse(args.scheme)
    target = artifact.with_name(f"{scheme.name}.tflite")
    former = target.stat().st_mtime_ns if target.exists() else None
    with spinner("quantize"):
        path = quantize(artifact, scheme, args.observations)
    kept = path.stat().st_mtime_ns == former
    _say(f"{'kept     ' if kept else 'quantised'} {path}{summary.check_text(path)}")
    if kept and Policy.load(path).sidecar.sources != provenance.sources():
        _say("          made by another version; delete it to make it anew")


def _evaluate(args: Namespace) -> None:
    artifacts = _artifacts(args, args.artifacts)
    summary.require_gated((Policy.load(path).sidecar.scheme for path in artifacts), args)
    _evaluate_all(args, artifacts, jobs=args.jobs or len(provenance.available_cores()))
    summary.require_gate(artifacts, args)


def _bench(args: Namespace) -> None:
    artifacts = _artifacts(args, args.artifacts, read_only=True)
    if args.json is not None:
        require_writable(args.json)  # Before the calls are timed.
    with progress_bar("bench") as update:
        measurements = bench(artifacts, args.calls, update)
    _console.print(summary.bench_table(measurements))
    if not measurements["at_rest"]:
        _warn(
            f"this machine is not at rest (load average {measurements['load_average']:.2f} of a "
            f"core; the 95th percentile of a fixed loop is {measurements['spread']:.2f} times its "
            "median): compare these times with each other, and quote none."
        )
    if args.json is not None:
        write_json(args.json, measurements)
        _say(f"bench     {args.json}")


def _record(args: Namespace) -> None:
    with spinner("record"):
        from quarl_tf.evaluation import video

        video.record(video.scene(_policies(args), args.seed, args.max_steps), args.out)
    _say(f"recorded  {args.out}")


def _watch(args: Namespace) -> None:
    from quarl_tf.evaluation import video

    video.watch(video.scene(_policies(args), args.seed, args.max_steps))


def _policies(args: Namespace) -> list[Policy]:
    artifacts = _artifacts(args, args.policies, _schemes(args), read_only=True)
    return [Policy.load(path) for path in artifacts]


def _blame(args: Namespace) -> None:
    (path,) = _artifacts(args, [args.policy], [REFERENCE])
    policy, content = float_policy(path)
    require_writable(blame_path(path))  # Before the episodes are played.
    with spinner("blame"):
        layers = blame(content, policy, args.episodes)
    _console.print(summary.blame_table(layers))
    _say("without it: all layers in int8 but this one; returns on selection seeds, against int8")
    rows = []
    for row in map(asdict, layers):
        gain = row["gain"] or {}
        limits = {f"gain_{name}": gain.get(name) for name in ("low", "high", "alike")}
        network = {"network_sha256": policy.sidecar.network_sha256}
        rows.append(row | {"gain": gain.get("mean"), **limits, **network})
    write_csv(blame_path(path), rows)
    _say(f"blame     {blame_path(path)}")
    worst = max(layers, key=lambda layer: layer.share).layer
    advice = "int8_head32" if worst == "head" else f"int8-{worst}=32"
    imports = Run.from_dict(policy.sidecar.run).imports
    gains = [layer.gain for layer in layers if layer.gain is not None]
    if not any(gain.mean > 0 and (gain.low > 0 or gain.alike) for gain in gains):
        _say("none of the layers measured certainly costs return; largest error:")
    _say(f"{worst} in float: quarl quantize {shlex.quote(str(path))} --scheme {advice}{imports}")


def _artifacts(
    args: Namespace,
    names: Iterable[str],
    schemes: Sequence[str] | None = None,
    *,
    read_only: bool = False,
) -> list[Path]:
    """Return the flatbuffers that names stand for: a file, a policy on the shelf or a run.

    Run ids stand for their flatbuffers of `schemes`, where there are any. Unless all are
    `read_only`, results can be written beside them.
    """
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if schemes and not _is_file(name):
            for scheme in schemes:
                paths.append(args.workspace.artifact(name, scheme))
                if not paths[-1].exists():
                    command = args.workspace.command(f"quarl export {name} --schemes {scheme}")
                    others = "name schemes that are there (--schemes), " * (len(schemes) > 1)
                    raise QuarlError(
                        f"{paths[-1]} is not there; make it ({command}), {others}or give the "
                        f"folder of the run (--root). Received: {name!r}"
                    )
        elif path.is_file() or path.suffix:
            paths.append(path)
        elif path.is_dir() or path.is_absolute() or len(path.parts) != 3:
            raise UsageError(
                "Name a .tflite file, or a policy on the shelf (`quarl list`) as "
                f"ENVIRONMENT/ALGORITHM/SCHEME. Received: {name!r}"
            )
        elif read_only:
            paths.append(shelf.find(path.as_posix(), args.workspace.shelf).artifact)
        else:
            paths.append(shelf.take(path.as_posix(), args.workspace.shelf))
            _say(f"found     {paths[-1]}")
    return paths


def _is_file(name: str) -> bool:
    """Tell whether a name is of a file or of a policy on the shelf, which no run id can be."""
    return "/" in name or name.endswith(".tflite")


def _report(args: Namespace) -> None:
    with spinner("report"):
        page = pipeline.report(
            args.runs,
            root=args.workspace.root,
            name=args.name,
            margin_percent=args.margin,
            chance=args.chance,
            command=args.command,
        )
    _say(f"report    {page}")
    if missing := len(read_json(page.with_name("results.json"))["missing"]):
        _warn(f"experiments without a result: {missing}; the report says why, and what makes them.")


def _study_plan(args: Namespace) -> None:
    study = _read_study(args.study)
    if args.commands:
        for line in engine.commands(args.workspace, study):
            _say(line)
        return
    statuses = plan(args.workspace, study)
    _console.print(summary.study_table(statuses))
    _console.print(summary.counts(statuses))


def _chosen_engine(args: Namespace) -> engine.LocalEngine | engine.RayEngine:
    """Return the engine of `--engine`; a UsageError for an option of the other one."""
    for name in ("jobs", "shard") if args.engine == "ray" else ("address", "cores", "gather"):
        if value := getattr(args, name):
            raise UsageError(
                f"Engine {args.engine} has no option --{name}; leave it out. "
                f"Received: --engine {args.engine}, {name}={value}"
            )
    if args.engine == "ray":
        gather_in = args.workspace.root.resolve() if args.gather else None
        cluster = engine.RayEngine(args.address, args.cores or 1, gather_in)
        if (args.cores or 1) > cluster.most_cores:
            _warn(
                f"no node of the cluster has {args.cores} cores, the largest {cluster.most_cores}: "
                "runs wait until such a node joins; give fewer --cores."
            )
        return cluster
    return engine.LocalEngine(args.jobs or len(provenance.available_cores()))


def _study_run(args: Namespace) -> None:
    workspace, study = args.workspace, _read_study(args.study)
    runs = {run.run_id: run for run, _ in study.experiments()}
    new_runs = [run for run_id, run in runs.items() if not state.is_trained(workspace, run_id)]
    _warn_slow(presets.of(run) for run in new_runs)
    chosen_engine = _chosen_engine(args)
    # Schedulers send it; the study then ends as at Ctrl-C, and gives up its claims.
    signal.signal(signal.SIGTERM, _interrupt)
    with progress_bar(f"study {study.name}") as update:
        statuses = engine.run(workspace, study, chosen_engine, _say, update, args.shard)
    _console.print(summary.counts(statuses))
    if unfinished := sum(status.state != State.EVALUATED for status in statuses):
        again = "start all shards again" if args.shard else "run the same command again"
        raise QuarlError(
            f"{unfinished} of {len(statuses)} experiments are not evaluated; read why by "
            f"`{_study_command(args, 'status')}`, fix it and {again}. "
            f"Received: study={study.name!r}"
        )
    _say(f"report it by `{_study_command(args, 'report')}`")


def _interrupt(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # A second one would cut the end short.
    raise KeyboardInterrupt


def _say(line: str) -> None:
    """Print a line without markup and line breaks, so that its paths can be copied."""
    _console.print(line, soft_wrap=True, markup=False)


def _study_status(args: Namespace) -> None:
    statuses = plan(args.workspace, _read_study(args.study))
    _console.print(summary.counts(statuses))
    unfinished = [status for status in statuses if status.state != State.EVALUATED]
    failures = [status for status in unfinished if status.state == State.FAILED]
    for run_id, reason, log in dict.fromkeys((f.run.run_id, f.reason, f.failure) for f in failures):
        more = "" if log is None else f"; more in {log}"
        _say(f"failed    {run_id}  ({reason}{more})")
    others = Counter(status.reason for status in unfinished if status.state != State.FAILED)
    for reason, count in others.items():
        _say(f"{reason}: {count}")


def _study_report(args: Namespace) -> None:
    study = _read_study(args.study)
    with spinner("report"):
        remedy = _study_command(args, "run")
        page = write_study_report(
            args.workspace, study, margin_percent=args.margin, command=args.command, remedy=remedy
        )
    _say(f"report    {page}")
    _console.print(summary.counts(plan(args.workspace, study)))


def _study_command(args: Namespace, action: str) -> str:
    return str(args.workspace.command(shlex.join(["quarl", "study", action, str(args.study)])))


def _inspect(args: Namespace) -> None:
    (artifact,) = _artifacts(args, [args.artifact], read_only=True)
    table = summary.content_table(artifact, flatbuffer.audit(artifact))
    fits = [] if args.board is None else boards.fits(artifact, args.board)
    _say(str(artifact))
    _console.print(table)
    if not fits:
        return
    _console.print(summary.boards_table(args.board, fits))
    if all(fit.lacking for fit in fits):  # More memory would not help.
        raise GateError(
            "No runtime for this board has all operators of the policy; quantise it to int8 unless "
            "it already is, or train or adopt one with ReLU or tanh. "
            f"Received: board={args.board!r}, lacking {', '.join(fits[0].lacking)}"
        )
    if not any(fit.holds for fit in fits):
        raise GateError(
            "This board does not hold the policy; quantise it to int8 unless it already is, or "
            f"take a smaller network or another board. Received: board={args.board!r}"
        )


def _list(args: Namespace) -> None:
    workspace = args.workspace
    with spinner("list"):
        shelf_table = summary.shelf_table(shelf.available(workspace.shelf))
    _console.print(shelf_table)
    table = Table("algorithm", "environments with a preset")
    for algo, pairs in groupby(presets.available(), key=itemgetter(0)):
        table.add_row(algo, ", ".join(env_id for _, env_id in pairs))
    _console.print(table)
    _console.print(
        f"schemes: {', '.join(LISTED_SCHEMES)}; int8-LAYER=32; ptq_wN, ptq_paper_wN and "
        "ptq_opt_wN for N = 2 ... 32; ptq_opt_wNaN for N = 2 ... 8; of trainings with --bits: "
        "qat_int8, qat_int4, and qat_wNaN for N = 2 ... 8"
    )
    runs = Table("run", "trained", "exported", "evaluated")
    on_shelf = workspace.root.resolve() == Path.cwd()
    for run_id in workspace.run_ids():
        folder = workspace.run_dir(run_id)
        if on_shelf and not (folder.exists() or run_id.startswith(f"{ADOPTED}-")):
            continue
        artifacts = list(workspace.artifact_dir(run_id).glob("*.tflite"))
        runs.add_row(
            run_id,
            "yes" if (folder / "training.json").exists() else "no",
            str(len(artifacts)),
            str(sum(map(is_evaluated, artifacts))),
        )
    if runs.rows:
        _console.print(runs)
    else:
        _say(f"no runs in {workspace.root.resolve()}")


def _doctor(_: Namespace) -> None:
    findings = doctor.examine()
    _console.print(summary.doctor_table(findings))
    failed = [finding.package for finding in findings if finding.remedy]
    if failed:
        raise QuarlError(
            f"{len(failed)} checks failed; see the table. Received: {', '.join(failed)}"
        )


def _requested_run(args: Namespace) -> tuple[Run, Preset]:
    if (args.task is None) == (args.env is None):
        raise UsageError(
            "A run has one environment; give it as ENV or as --env ID (quarl list). "
            f"Received: ENV={args.task!r}, --env={args.env!r}"
        )
    given_id = args.env if args.task is None else args.task
    env_id = environments.canonical_id(given_id)
    _warn_renamed(given_id, env_id)
    overrides = dict(_override(text) for text in args.overrides)
    for name, value in (("until", args.until), ("precision", args.precision)):
        if value is not None and overrides.setdefault(name, value) != value:
            raise UsageError(
                f"Give it once. Received: --{name} {value}, -p {name}={overrides[name]}"
            )
    algo = args.algo
    if algo is None:
        algo = presets.best(env_id, args.presets)
        _say(f"algorithm {algo}  (its preset of {env_id}; --algo takes another)")
    environments.require_actions(algo, environments.env_spec(env_id))
    preset = presets.load(algo, env_id, overrides, args.presets)
    quantization = _quantization(args, algo, preset)
    presets_file = None if args.presets is None else str(args.presets)
    run = Run(algo, env_id, args.seed, overrides, quantization, args.modules, presets_file)
    if args.origin is not None:
        run = pipeline.with_origin(args.workspace, args.origin, run, preset)
    state.require_possible_settings(run, preset)
    return run, preset


def _warn(line: str) -> None:
    print(f"quarl: {line}", file=sys.stderr)


def _warn_renamed(given_id: str, current_id: str) -> None:
    if given_id != current_id:
        _warn(f"{given_id} is now {current_id}, which is used.")


def _warn_slow(used_presets: Iterable[Preset]) -> None:
    precisions = {preset.precision for preset in used_presets}
    if "bfloat16" in precisions and not provenance.processor().endswith("bf16"):
        _warn(
            "this processor has no instructions for bfloat16, the precision of the hidden layers, "
            "and is usually many times slower in it than in float32; to train in float32 give "
            "--precision float32 (in a study, overrides)."
        )


def _read_study(path: Path) -> Study:
    study = read(path)
    for env_id in dict.fromkeys(study.env_ids):
        _warn_renamed(env_id, environments.canonical_id(env_id))
    return study


def _check_network(run: Run, preset: Preset, schemes: Iterable[str] = ()) -> None:
    from quarl_tf import agents
    from quarl_tf.quantization import watching

    spec = environments.env_spec(run.env_id)
    network = watching(run.quantization)(agents.build_network(run.algo, spec, preset, run.seed))
    kernels = {layer.name for layer in network.layers if hasattr(layer, "kernel")}
    for scheme in map(Scheme.parse, schemes):
        # A flatbuffer has no names for a dueling network's value.
        unnamed = () if scheme.aware else {name for name in kernels if name.startswith("value")}
        scheme.recipe.require_layers(kernels.difference(unnamed))


def _quantization(args: Namespace, algo: str, preset: Preset) -> Quantization | None:
    """Return the quantisation of `--bits`, `--quant-delay` and `-q`; None without `--bits`."""
    options = dict(_override(text, "-q") for text in args.quantization)
    if args.bits is None:
        if args.quant_delay is not None or options:
            raise UsageError(
                "A delay or -q is for quantisation-aware training; add --bits N. "
                f"Received: quant_delay={args.quant_delay}, -q {options}"
            )
        return None
    for name, flag in (("bits", "--bits"), ("delay", "--quant-delay")):
        if name in options:
            raise UsageError(f"Give it with {flag}. Received: -q {name}={options[name]}")
    delay = preset.steps // 2 if args.quant_delay is None else args.quant_delay
    return presets.quantization(algo, {**options, "bits": args.bits, "delay": delay})


def _override(text: str, option: str = "-p") -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise UsageError(f"An override is KEY=VALUE. Received: {option} {text!r}")
    try:
        return key, tables.parse(value)
    except ValueError:
        raise UsageError(f"The value of an override is not readable. Received: {text!r}") from None


def _schemes(args: Namespace, run: Run | None = None, *, reference: bool = False) -> list[str]:
    """Return the schemes asked for, which have to be those of a `run`; `reference` adds fp32."""
    if args.schemes is None and run is not None:
        # Without the training, the default ones that can be used or have a result.
        usable, workspace = state.usual_schemes(args.workspace, run), args.workspace
        paths = [workspace.artifact(run.run_id, name) for name in run.default_schemes]
        names = [path.stem for path in paths if path.stem in usable or _stands(args, run, path)]
        names = names or [*run.default_schemes[:1]]
    else:
        names = [name.strip() for name in args.schemes.split(",") if name.strip()]
    if not names:
        raise UsageError(f"Name at least one scheme. Received: --schemes {args.schemes!r}")
    schemes = [Scheme.parse(name) for name in names]
    if run is not None:
        require_possible(run, schemes)
    return list(dict.fromkeys([REFERENCE] * reference + [scheme.name for scheme in schemes]))


def _train_one(args: Namespace, run: Run, preset: Preset) -> None:
    workspace = args.workspace
    state.require_trainable(workspace, run, preset)
    if args.dry_run:
        if state.finished_training(workspace, run, preset) is None:
            _check_network(run, preset)
            _say(f"train    {workspace.run_dir(run.run_id)}")
        return
    if not state.is_trained(workspace, run.run_id):
        _warn_slow([preset])
    with progress_bar(f"train {run.run_id}") as update:
        record = pipeline.train(run, root=workspace.root, update=update)
    _say(
        f"trained   {workspace.run_dir(run.run_id)}  (kept the network of step "
        f"{record.best_step:,}: greedy return {record.selection_return:.1f} on selection seeds)"
    )
    curve = workspace.run_dir(run.run_id) / "progress.csv"
    rows = list(csv.DictReader(curve.read_text().splitlines())) if curve.exists() else []
    if rows and rows[-1].get("episodes") == "0":
        _warn(
            "no episode ended during the training: it has too few steps for one, or too few "
            "between checkpoints, which begin new ones (-p checkpoint_every=…)."
        )


def _export_all(args: Namespace, run_id: str, schemes: Sequence[str] | None) -> list[Path]:
    with progress_bar(f"export {run_id}") as update:
        artifacts = pipeline.export(run_id, schemes, root=args.workspace.root, update=update)
    _say(f"exported  {artifacts[0].parent}  ({', '.join(path.stem for path in artifacts)})")
    return artifacts


def _export_and_evaluate(args: Namespace, run: Run, schemes: Sequence[str]) -> list[Path]:
    """Export and evaluate; a scheme that cannot be exported fails after the others' evaluation."""
    artifacts = [args.workspace.artifact(run.run_id, scheme) for scheme in schemes]
    needed = [path for path in artifacts if not _stands(args, run, path)]
    schemes = [path.stem for path in needed]
    try:
        if needed:
            _export_all(args, run.run_id, schemes)
    except QuarlError:
        failed = state.not_exported(args.workspace, run, schemes)
        made, shown = ([p for p in ps if p.stem not in failed] for ps in (needed, artifacts))
        _evaluate_all(args, made, shown)
        raise
    _evaluate_all(args, needed, artifacts)
    return artifacts


def _stands(args: Namespace, run: Run, artifact: Path) -> bool:
    """Tell whether a result is all there is: without its training, its file need not be kept."""
    if artifact.exists() or run.adopted or state.is_begun(args.workspace, run.run_id):
        return False
    status = state.state(
        args.workspace, run, artifact.stem, chance=args.chance, episodes=args.episodes
    )
    return status.evaluation is not None


def _evaluate_all(
    args: Namespace, artifacts: Sequence[Path], shown: Sequence[Path] | None = None, jobs: int = 1
) -> None:
    for path in artifacts:
        with progress_bar(f"evaluate {path.stem}") as update:
            options = {"chance": args.chance, "update": update, "jobs": jobs}
            pipeline.evaluate(path, args.episodes, **options)
    shown = artifacts if shown is None else shown
    for folder in dict.fromkeys(path.parent for path in shown):
        siblings = [path for path in shown if path.parent == folder]
        _console.print(summary.results_table(siblings, args, _console.width))
        for note in summary.notes(siblings[0], args):
            _console.print(note, markup=False)


_VERBS: Mapping[str, Callable[[Namespace], None]] = {
    function.__name__[1:].replace("_", " "): function
    for function in (
        *(_run, _train, _checkpoint_save, _export, _adopt, _quantize, _blame, _evaluate, _bench),
        *(_record, _watch, _report, _study_plan, _study_run, _study_status, _study_report),
        *(_inspect, _list, _doctor),
    )
}
