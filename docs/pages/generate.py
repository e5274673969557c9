"""Generate pages of the site from the code, the presets and the records."""

import argparse
import ast
import heapq
import io
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import matplotlib.pyplot as plt
import mkdocs_gen_files
import pandas

from quarl_tf import presets, study
from quarl_tf.cli import arguments
from quarl_tf.evaluation.shelf import Entry, shelf
from quarl_tf.presets import ALGORITHMS, tables
from quarl_tf.report.page import number_text, percent, size, templates
from quarl_tf.spec import REFERENCE, LayerFormat, Run, Scheme, TensorFormat
from quarl_tf.spec.recipe import QAT_BITS
from quarl_tf.spec.scheme import LISTED_SCHEMES
from quarl_tf.store.workspace import Workspace

sys.path.append(str(Path(__file__).parent))  # MkDocs runs this file by its path.

from records import DASH, MODELS, ROOT, benchmark, report, table

PACKAGE, REPORTS = ROOT / "quarl_tf", ROOT / "reports"

#: From the ground up.
ROOMS = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/design/rooms.md").read_text(), re.MULTILINE)


#: Reports that are pages.
STUDIES = (
    *("ptq", "games", "games-again", "games-greedy", "games-sampled", "int8", "qat", "few-bits"),
    *("fine-tuning", "li", "regularisation", "options", "airnav"),
)


def write(path: str, text: str, *, after: bool = False) -> None:
    """Write a page, or `after` the handwritten page of this path."""
    if after:
        text = (ROOT / "docs" / path).read_text() + "\n" + text
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(text)


def command_line() -> str:
    """Return the help of every subcommand."""
    parsers = _parsers(arguments.build())
    sections = (f"## {one.prog}\n\n```text\n{one.format_help()}```\n" for one in parsers)
    return "\n".join(["# Command line\n", *sections])


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _parsers(verb)


def preset_tables() -> str:
    """Return a table for each algorithm, with a row for each setting and columns of tasks."""
    parts = ["# Presets\n\nThe source of each number is in `quarl_tf/presets/<algorithm>.yaml`.\n"]
    for algo in ALGORITHMS:
        presets = [item for item in tables.shipped(algo).items() if item[0] != "quantization"]
        named = sorted(presets, key=lambda item: (repr(item[1]), item[0]))
        groups = [list(group) for _, group in groupby(named, key=lambda item: repr(item[1]))]
        header = [algo, *("<br>".join(env_id for env_id, _ in group) for group in groups)]
        columns = [group[0][1] for group in groups]
        keys = dict.fromkeys(key for values in columns for key in values)
        rows = [[f"`{key}`", *(values.get(key, "") for values in columns)] for key in keys]
        parts += [f"## {algo}\n", table(header, rows)]
    return "\n".join(parts)


def schemes() -> str:
    """Return the recipe of every scheme."""
    qat = ("qat_int8", "qat_int4", *(f"qat_w{bits}a{bits}" for bits in QAT_BITS))
    rows = []
    for scheme in map(Scheme.parse, (*LISTED_SCHEMES, "ptq_paper_w8", "ptq_opt_w4", *qat)):
        recipe = scheme.recipe
        forms = (recipe.default, recipe.observation, recipe.head)
        kind = "native" if scheme.native else "simulated"
        rows.append([f"`{scheme.name}`", *map(_layer, forms), kind])
    header = ["scheme", "layers", "observation", "head", "file"]
    return (
        "# Schemes\n\nA scheme is a named recipe and how its file stores it; its name parses to "
        "the recipe. `ptq_wN`, `ptq_paper_wN` and `ptq_opt_wN` are there for N = 2 … 32; "
        "`ptq_w4-head=8` has 8 bits in the head, `int8-hidden_1=32` a layer in float. The "
        "converter leaves kernels of fewer than 1024 numbers of `dynamic_int8` in float32. Grids "
        "are explained in [quantisers](../design/quantisers.md).\n\n" + table(header, rows)
    )


def _layer(form: LayerFormat) -> str:
    parts = {"weights": form.weights, "activations": form.activations}
    said = [f"{what}: {_tensor(one)}" for what, one in parts.items() if one is not None]
    return "<br>".join(said) or "float32"


def _tensor(form: TensorFormat) -> str:
    if form.ieee:
        return f"float{form.bits}"
    extra = ["symmetric"] * form.symmetric + ["per channel"] * form.per_channel
    extra += (
        ["by GPTQ"] * (form.rounding == "gptq")
        + ["rounded down"] * (form.rounding == "floor")
        + ["range/2ⁿ"] * (form.step == "paper")
    )
    return ", ".join([f"{form.bits} bits", *extra])


def algorithm(algo: str) -> str:
    """Return the numbered deviations of an algorithm and the commands of its results."""
    said = ast.get_docstring(ast.parse((PACKAGE / f"agents/{algo}.py").read_text())) or ""
    deviations = re.sub(r"`agents`", "the end of this page", said[said.index("Deviations") :])
    of_all = ast.get_docstring(ast.parse((PACKAGE / "agents/__init__.py").read_text())) or ""
    common = of_all[of_all.index("Deviations of all") :].partition(":")[2].strip()
    rows = [
        [e.run.env_id, number_text(c and c.reference_mean), f"`{e.run.commands(REFERENCE)}`"]
        for e in SHELF
        if e.run.algo == algo and e.sidecar.scheme == REFERENCE
        for c in [e.comparison()]
    ]
    heading, _, listed = deviations.partition("\n")
    return (
        f"## Deviations\n\nF{heading.removeprefix('Deviations f')}\n{listed}\n\n"
        f"In every algorithm {common}\n\n"
        "## Results\n\nThe run that did best on selection seeds, and the command that makes it.\n\n"
        + table(["task", "return of fp32", "command"], rows)
    )


def fields(record: str) -> str:
    """Return the fields of a record with their types and comments."""
    source = (PACKAGE / "store/records.py").read_text()
    lines = source.splitlines()
    body = next(n.body for n in ast.parse(source).body if getattr(n, "name", "") == record)
    rows = []
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said, above = [lines[node.end_lineno - 1].partition("#: ")[2]], node.lineno - 2
            while lines[above].strip().startswith("#:"):
                said.insert(0, lines[above].strip().removeprefix("#:").strip())
                above -= 1
            kind = ast.unparse(node.annotation).replace("|", "or")
            rows.append([f"`{node.target.id}`", kind, " ".join(said).strip()])
    return table(["field", "type", "meaning"], rows)


def result(name: str) -> str:
    """Return a report as a page."""
    text = (REPORTS / name / "report.md").read_text()

    def figure(match: re.Match[str]) -> str:
        with mkdocs_gen_files.open(f"reports/{name}/{match[2]}", "wb") as file:
            file.write((REPORTS / name / match[2]).read_bytes())
        return f"![{match[1]}]({name}/{match[2]})"

    return re.sub(r"!\[([^]]*)\]\(([^)]+)\)", figure, text)


def benchmarks() -> str:
    """Return the speed tables."""
    folder = ROOT / "benchmarks"
    return (
        "# Benchmarks\n\n## Training\n\nAgainst Stable-Baselines3 and SBX by the same "
        "hyper-parameters, alternating on one machine "
        "(`python benchmarks/training_throughput.py`). The floor is the environment with random "
        "actions and then the networks' multiplications at the speed of large products. Games are "
        "in bfloat16 here and in float32 there.\n\n"
        + (folder / "training_throughput.md").read_text()
        + "\n### In float32 on both sides\n\n"
        + (folder / "training_throughput_float32.md").read_text()
        + "\n## Time to solve\n\nEach library with its own recipe of the same algorithm, "
        "rl-baselines3-zoo's and ours (`benchmarks/solving.yaml`), whose step size and rollout for "
        "LunarLander were chosen on other seeds of the task: a ratio compares recipe and speed "
        "together. A task is solved when 20 greedy episodes on selection seeds reach the goal on "
        "average; *confirmed* is the mean return of 100 others. Seconds, steps and ratios are of "
        "the trainings that solved it (`python benchmarks/time_to_solve.py`).\n\n"
        + (folder / "time_to_solve.md").read_text()
        + "\n## Trainings of games\n\nThose of `studies/games.yaml`, on several machines that were "
        "not at rest; of those that go on from another the last part. Medians with the range.\n\n"
        + _trainings_of_games()
    )


def _trainings_of_games() -> str:
    rows = []
    runs = [row for row in report("games")["runs"] if row["scheme"] == "fp32"]
    for cell, group in groupby(runs, key=lambda row: row["cell"]):
        paths = [Workspace(ROOT).artifact_dir(row["run_id"]) / "progress.csv" for row in group]
        ends = [pandas.read_csv(path).iloc[-1] for path in paths]
        timed = [end for end in ends if "seconds" in end]
        minutes = [end["seconds"] / 60 for end in timed]
        rates = [end["step"] / end["seconds"] for end in timed]
        steps = f"{ends[0]['step'] / 1e6:.1f}"
        rows.append([cell, len(ends), steps, *map(_median_and_range, (minutes, rates))])
    return table(["cell", "trainings", "million steps", "minutes", "steps/s"], rows, 4)


def _median_and_range(values: Sequence[float]) -> str:
    if len(values) < 2:
        return number_text(values[0] if values else None)
    parts = (statistics.median(values), min(values), max(values))
    return "{} [{}, {}]".format(*map(number_text, parts))


#: Trainings that run in parallel, each on two cores.
_AT_A_TIME = {"2 cores": 1, "32 cores": 16, "ten machines of 32 cores": 160}


def costs() -> str:
    """Return the hours of training of QuaRL's matrix, by measured rates."""
    studies = {name: study.read(ROOT / f"studies/{name}.yaml") for name in ("quarl", "classic")}
    hours = {name: _training_hours(one) for name, one in studies.items()}
    whole = [
        [f"`{name}.yaml`", len(studies[name].experiments()), len(found)]
        + [f"{_makespan(found, slots):,.1f}" for slots in _AT_A_TIME.values()]
        for name, found in hours.items()
    ]
    cells: dict[tuple[str, str], list[tuple[Run, float]]] = {}
    for job in hours["quarl"]:
        cells.setdefault((job[0].algo, job[0].env_id), []).append(job)
    rows = []
    for (algo, env_id), found in cells.items():
        measured, rate = _closest(algo, env_id, _rates())
        origin = "measured" if measured == env_id else f"of {measured}, the closest"
        cell = f"{algo} on {env_id}"
        rows.append([cell, origin, len(found), f"{rate:,.0f}", f"{_makespan(found, 1):,.2f}"])
    return (
        "## What QuaRL's matrix takes\n\n`studies/quarl.yaml` has the papers' whole matrix, "
        "`studies/classic.yaml` its part without games. Hours of training alone: environment steps "
        "of the presets by the [measured rates](../results/benchmarks.md) of one training on two "
        "cores, times what quantisation-aware training was measured to take longer; as many "
        "trainings at a time as there are pairs of cores, each after its plain reference.\n\n"
        + table(["study", "experiments", "trainings", *_AT_A_TIME], whole, 5)
        + table(["cell", "rate", "trainings", "steps/s", "hours on 2 cores"], rows, 3)
    )


def _rates() -> dict[tuple[str, str], float]:
    return {
        (one["algo"], one["env_id"]): statistics.median(one["steps_per_second"]["ours"])
        for one in benchmark("training_throughput").values()
    }


def _slowdowns() -> dict[tuple[str, str], tuple[float, float]]:
    """Return the slowdown of quantisation-aware training before and after the delay.

    What was measured is that of learning, one part of a training.
    """
    shares = {
        (one["algo"], one["env_id"]): one["shares"]["learning"] / 100
        for one in benchmark("training_throughput").values()
    }
    slowdowns = {}
    for name, one in benchmark("qat_overhead")["cases"].items():
        algo, env_id, *_ = name.split()
        share = _closest(algo, env_id, shares)[1]
        ratios = (statistics.median(one[part]) for part in ("before", "after"))
        before, after = (1 + share * (ratio - 1) for ratio in ratios)
        slowdowns[algo, env_id] = before, after
    return slowdowns


def _closest(algo: str, env_id: str, known: dict[tuple[str, str], float]) -> tuple[str, float]:
    """Return the value of an environment, else of a similar one, for a game that of a game."""
    alike = sorted(
        (other != env_id, ("NoFrameskip" in other) != ("NoFrameskip" in env_id), other)
        for one, other in known
        if one == algo
    )
    other = alike[0][-1]
    return other, known[algo, other]


def _training_hours(wanted: study.Study) -> list[tuple[Run, float]]:
    """Return the runs with their hours."""
    rates, slowdowns, found = _rates(), _slowdowns(), {}
    for run, _ in wanted.experiments():
        steps: float = presets.of(run).steps
        rate = 3600 * _closest(run.algo, run.env_id, rates)[1]
        if run.quantization is not None:
            before, after = _closest(run.algo, run.env_id, slowdowns)[1]
            delay = run.quantization.delay
            steps = delay * before + (steps - delay) * after
        found[run.run_id] = run, steps / rate
    return list(found.values())


def _makespan(jobs: list[tuple[Run, float]], slots: int) -> float:
    """Return the hours until all jobs are done: plain ones first, then the longest."""
    free, ends = [0.0] * slots, dict[str, float]()
    for run, hours in sorted(jobs, key=lambda job: (job[0].quantization is not None, -job[1])):
        start = max(heapq.heappop(free), ends.get(run.plain.run_id, 0.0))
        ends[run.run_id] = start + hours
        heapq.heappush(free, ends[run.run_id])
    return max(ends.values())


def policies() -> str:
    """Return a table of the best policies by task and algorithm, and write a card for each."""
    rows = []
    for (env_id, algo), group in groupby(SHELF, key=lambda e: (e.run.env_id, e.run.algo)):
        found = list(group)
        native = next((e for e in found if e.sidecar.scheme == "int8"), found[0])
        _, verdict, _, _, mean, fp32, error, native_size = _card_row(native)
        link = f"[{algo}]({env_id}-{algo}.md)"
        rows.append([env_id, link, fp32, mean, error, verdict, native_size])
        write(f"policies/{env_id}-{algo}.md", card(native, found))
    header = ["task", "policy", "fp32", "int8", "error", "verdict", "size"]
    return (
        "# Policies\n\nTrained policies of this repository: for each task, algorithm and scheme "
        "the one that did best on selection seeds. `quarl list` shows them in the terminal, and "
        "`quarl evaluate CartPole-v1/dqn/int8` shows the evaluation of one by its name.\n\n"
        + table(header, rows, 2)
    )


def card(native: Entry, found: list[Entry]) -> str:
    """Return the card of a task's policies by one algorithm, and how to act with one of them."""
    env_id, algo, sidecar = native.run.env_id, native.run.algo, native.sidecar
    actions = (
        f"{sidecar.num_actions} discrete actions"
        if sidecar.num_actions is not None
        else f"a continuous action of {len(sidecar.action_low or [])} numbers"
    )
    evaluation = native.evaluation()
    rules = templates().filters["protocol"](evaluation.protocol).strip() if evaluation else DASH
    origin = [["algorithm", "adopted, as [others trained it](../results/sb3.md)"]]
    if not native.run.adopted:
        origin = [
            ["algorithm", f"[{algo}](../algorithms/{algo}.md)"],
            ["environment steps", f"{sidecar.preset['steps']:,}"],
            ["network", sidecar.preset["network"]],
        ]
    facts = [
        *origin,
        ["observation", f"{sidecar.observation_shape} {sidecar.observation_dtype}"],
        ["action", f"{actions}; head: {sidecar.head}"],
        ["rules of an episode", rules],
        ["licence", "Apache-2.0"],
    ]
    header = ["scheme", "verdict", "run", "sha256", "return", "fp32", "error", "size"]
    found = sorted(found, key=lambda e: (-Scheme.parse(e.sidecar.scheme).weight_bits, e.name))
    commands = "".join(f"{entry.command()}\n" for entry in found)
    again = "" if native.run.adopted else f"{native.run.commands(native.sidecar.scheme)}\n"
    act = (
        f'```python\nfrom quarl_tf import Policy\n\npolicy = Policy.load("{native.artifact}")\n'
        "action = policy.act(observation)\n```\n"
    )
    return (
        f"# {algo} on {env_id}\n\n"
        + table(["task", env_id], facts)
        + "## Schemes\n\nOf each scheme the run that did best on selection seeds, and its fp32 "
        "in the same episodes.\n\n"
        + table(header, map(_card_row, found), 4)
        + "\n## Play or make them\n\nFiles that another command makes again are not kept.\n\n"
        + f"```\n{commands}{again}```\n"
        + "\n## Act with it\n\n"
        + act
        + "\n## Limits\n\nMeasured on evaluation seeds of the task as it is registered; the return "
        "in another version of the environment, or on hardware that rounds otherwise, may differ. "
        "Simulated schemes have no size of their own.\n"
    )


def _card_row(entry: Entry) -> list[str]:
    sidecar, outcome = entry.sidecar, entry.outcome()
    return [
        f"`{sidecar.scheme}`",
        outcome.verdict or DASH,
        entry.artifact.parent.name,
        f"`{sidecar.sha256[:12]}`",
        number_text(outcome.mean_return),
        number_text(outcome.reference_mean),
        percent(outcome.error_percent),
        size(sidecar.size_bytes) if sidecar.native else "simulated",
    ]


def rooms() -> str:
    """Draw the imports between rooms, without those that others imply."""
    arrows = {room: _imports(room) - {room} for room in ROOMS}
    for _ in ROOMS:
        for room, below in arrows.items():
            implied = {deep for one in below for deep in _reached(one, arrows)}
            arrows[room] = below - implied
    floor: dict[str, int] = {}
    for room in ROOMS:
        floor[room] = 1 + max((floor[one] for one in arrows[room]), default=-1)
    return _drawing(arrows, floor)


def _reached(room: str, arrows: dict[str, set[str]]) -> set[str]:
    return {deep for one in arrows[room] for deep in {one} | _reached(one, arrows)}


def _imports(room: str) -> set[str]:
    found: set[str] = set()
    for path in (*(PACKAGE / room).rglob("*.py"), *PACKAGE.glob(f"{room}.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quarl_tf"):
                _, *parts = str(node.module).split(".")
                found |= set(parts[:1] or (alias.name for alias in node.names)) & set(ROOMS)
    return found


def _drawing(arrows: dict[str, set[str]], floor: dict[str, int]) -> str:
    by_floor = {f: [room for room in ROOMS if floor[room] == f] for f in set(floor.values())}
    place = {
        room: ((i - (len(row) - 1) / 2) * 2.6, f * 1.0)
        for f, row in by_floor.items()
        for i, room in enumerate(row)
    }
    figure, axes = plt.subplots(figsize=(8, 9))
    for room, below in arrows.items():
        for one in sorted(below):
            axes.annotate(
                "",
                place[one],
                place[room],
                arrowprops={"arrowstyle": "-|>", "color": "0.6", "shrinkA": 12, "shrinkB": 12},
            )
    for room, (x, y) in place.items():
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#e8eaf6", "edgecolor": "#3f51b5"}
        axes.text(x, y, room, ha="center", va="center", bbox=box, fontsize=11)
    widest = max(map(len, by_floor.values()))
    axes.set_xlim(-1.3 * widest, 1.3 * widest)
    axes.set_ylim(-0.5, max(floor.values()) + 0.5)
    axes.axis("off")
    image = io.StringIO()
    figure.savefig(image, format="svg", bbox_inches="tight")
    plt.close(figure)
    return image.getvalue()


SHELF = shelf(MODELS)

write("reference/command-line.md", command_line())
write("reference/presets.md", preset_tables())
write("reference/schemes.md", schemes())
records = f"## A sidecar\n\n{fields('Sidecar')}\n## An evaluation\n\n{fields('Evaluation')}"
write("reference/files.md", records, after=True)
for algo in ALGORITHMS:
    write(f"algorithms/{algo}.md", algorithm(algo), after=True)
for name in STUDIES:
    write(f"reports/{name}.md", result(name))
write("results/benchmarks.md", benchmarks())
write("policies/index.md", policies())
write("guide/studies.md", costs(), after=True)
write("design/rooms.svg", rooms())
