"""Runs the experiments that answer the project's questions on one GPU, and draws their tables.

    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --section partners --parallel 6
    python benchmarks/experiments.py --section first worst --parallel 5    # whom they meet, and learners
    python benchmarks/experiments.py --section search pretraining --parallel 1    # seconds are compared
    python benchmarks/experiments.py --draw                                # only tables, from docs/data

Every command is run once (its folder in --run-dir then has NAME.seconds), and training that was cut
off goes on from its checkpoint; sections share trainings.

What is run stands in sections.py, what is printed and drawn in tables.py. Settings were chosen with
seeds below 21 and are tested with seeds from 21 on.
"""

import concurrent.futures
import dataclasses
import json
import math
import subprocess
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import tables
from benchmarks.sections import GRU, SECTIONS, VAE, Run, Section
from benchmarks.tables import HARDEST, read, read_csv
from evaluation.runs import write_csv

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
GAMES_TOGETHER = {  # column: partners, what is measured, which games count
    "game 1": ("", "return", range(1, 2)),
    "game 2": ("", "return", range(2, 3)),
    "games 3 to 20": ("", "return", range(3, 21)),
    "shuffled": ("", "shuffled", range(11, 21)),
    "nearest_stag": ("_nearest_stag", "return", range(2, 21)),
    "left_stag": ("_left_stag", "return", range(2, 21)),
}


@dataclasses.dataclass
class Args:
    section: tuple[str, ...] = tuple(SECTIONS)  # which sections
    list: bool = False  # only say what there is
    draw: bool = False  # only print the tables and draw the figures, from docs/data
    parallel: int = 3  # runs at once
    extra: str = ""  # flags of all learners, for example to try them on a CPU
    run_dir: str = "runs/experiments"  # where the runs go
    docs: str = str(ROOT / "docs")  # tables go to data, figures to results in here


# ---- Running
def name_of(text: str) -> str:
    words = "".join(c if c.isalnum() else "_" for c in text)
    return f"{words[:120]}_{zlib.crc32(text.encode()):08x}"


def command_of(args: Args, run: Run) -> str:
    extra = args.extra if run.script != VAE else ""
    return f"{run.script} {run.flags} {extra}".strip()


def folder_of(args: Args, run: Run) -> Path:
    return Path(args.run_dir).resolve() / name_of(command_of(args, run))


def done_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.seconds")


def checkpoint_folder(args: Args, run: Run) -> str:
    """Of several seeds the first one's has the checkpoint"""
    folder = folder_of(args, run)
    found = sorted(folder.glob("*/checkpoint.pt"))
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint")
    return str(found[0].parent)


def words_of(args: Args, run: Run, command: str) -> list[str]:
    """With folders in the place of RUN and @NAME"""
    words = []
    for word in command.split():
        before, _, name = word.partition("@")
        if name:
            word = before + checkpoint_folder(args, SECTIONS["first"].runs[name])
        words.append(checkpoint_folder(args, run) if word == "RUN" else word)
    return words


def call(words: list[str], folder: Path) -> None:
    """folder: of what it writes; beside it a log, and at the end how long it took"""
    start = time.perf_counter()
    with open(folder.with_name(f"{folder.name}.log"), "a") as file:
        subprocess.run([sys.executable, *words], cwd=ROOT, stdout=file, stderr=file, check=True)
    done_file(folder).write_text(f"{time.perf_counter() - start:.1f}")


def make(args: Args, run: Run) -> None:
    folder = folder_of(args, run)
    folder.mkdir(parents=True, exist_ok=True)
    if not done_file(folder).exists():
        words = [*words_of(args, run, command_of(args, run)), "--run-dir", str(folder)]
        if run.script != GRU and list(folder.glob("*/checkpoint.pt")):  # GRU begins anew
            words = [run.script, "--resume", checkpoint_folder(args, run)]
        call(words, folder)
    for command in run.then:
        place = folder / name_of(command)
        if not done_file(place).exists():
            call(words_of(args, run, command), place)


def make_all(args: Args, runs: list[Run]) -> None:
    start = time.perf_counter()
    longest_first = sorted(dict.fromkeys(runs), key=lambda run: -len(run.then))
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(make, args, run): run for run in longest_first}
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            error = job.exception()
            state = "done" if error is None else f"FAILED, see its logs: {error}"
            seconds = f"{time.perf_counter() - start:.0f} s"
            name = folder_of(args, jobs[job]).name
            print(f"{seconds}, {count} of {len(jobs)}: {state}: {name}", flush=True)


# ---- docs/data, from the folders of the runs
def watched_steps(flags: dict, iterations: int) -> int:
    """Env steps of rule-based games that the models of a seed have learned from after so many
    iterations. flags: as in args.json, without checkpoints of the pretraining scripts"""
    searches = flags.get("planner", "none") != "none"
    if not (flags["imagination"] or searches or flags["subgoals"] != "none"):
        return 0
    watched = 0
    updates = flags["pretraining_updates"]
    if updates:
        watched = max(1, min(8, updates // 10)) * flags["pretraining_games"] * flags["num_steps"]
    if flags["offline_ratio"]:
        rollouts = flags["replay_rollouts"] + math.ceil(iterations / flags["replay_rollouts"])
        watched += rollouts * math.ceil(flags["num_envs"] / 2) * flags["num_steps"]
    return watched


def summary_of(folder: Path, columns: tuple[str, ...]) -> dict:
    """Of a seed's folder: means over the last fifth of its rows; when a return of 2.8 was reached"""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = lines[-max(1, len(lines) // 5) :]
    row = {"return": np.mean([line["charts/episodic_return"] or 0 for line in last])}
    if "moa_gap" in columns:
        row["moa_gap"] = np.mean([line["moa/nll"] - line["moa/ceiling/nll"] for line in last])
    # Not in the first line, which may count only games that ended early
    reached = [line for line in lines[1:] if (line["charts/episodic_return"] or 0) >= 2.8]
    if not reached:
        return row | {"steps_to_2.8": "never"}
    row["steps_to_2.8"] = reached[0]["steps"]
    if "watched_to_2.8" in columns:
        flags = json.loads((folder / "args.json").read_text())
        iterations = reached[0]["steps"] // (flags["num_envs"] * flags["num_steps"])
        row["watched_to_2.8"] = watched_steps(flags, iterations)
    if "seconds_to_2.8" in columns:
        row["seconds_to_2.8"] = reached[0]["time/ready"] + reached[0]["time/training"]
    return row


def read_partners(folder: Path) -> tuple[list[dict], list[dict]]:
    """What partners.py says -> columns of each seed; the mean return in each game"""
    found, curve = {}, {}
    for path in sorted(folder.glob("*/partners*.csv")):
        population = path.stem.removeprefix("partners")
        for row in read_csv(path):
            game = int(row["game"])
            if not population:
                curve.setdefault(game, []).append(float(row["return"]))
            for column, (partners, measure, games) in GAMES_TOGETHER.items():
                if partners == population and game in games and row.get(measure):
                    of_seed = found.setdefault(row["seed"], {})
                    of_seed.setdefault(column, []).append(float(row[measure]))
    means = [{column: np.mean(x) for column, x in of_seed.items()} for of_seed in found.values()]
    return means, [{"game": game, "return": np.mean(x)} for game, x in curve.items()]


def read_teams(folder: Path, files: tuple[str, ...]) -> tuple[list[dict], list[dict]]:
    """What adapt.py says -> the mean score of each seed; returns beside the hardest team"""
    scores, hardest = {}, {}
    for sets in files:
        for path in folder.glob(f"*/adaptation_{sets}*.csv"):
            for row in read_csv(path):
                by_repetition = row["mode"] == tables.BAYES  # nobody trained it
                seed = row["repetition"] if by_repetition else row["seed"]
                place = sets, row["co_players"], row["mode"], seed
                scores.setdefault(place, []).append(float(row["score"]))
                if row["co_players"] == HARDEST and row["mode"] == "learning":
                    for name in filter(lambda name: name.startswith("return at"), row):
                        hardest.setdefault(name.split()[-1], []).append(float(row[name]))
    names = ("sets", "co_players", "mode", "seed")
    rows = [dict(zip(names, place, strict=True)) | {"score": np.mean(x)} for place, x in scores.items()]
    return rows, [{"steps": steps, "return": np.mean(x)} for steps, x in hardest.items()]


def read_moa(folder: Path) -> list[dict]:
    """What evaluate.py says of MOA"""
    names = ("about", "seed", "measure", "value")
    rows = [row for path in sorted(folder.glob("*/evaluation_*.csv")) for row in read_csv(path)]
    return [{name: row[name] for name in names} for row in rows if row["measure"] in tables.MOA_COLUMNS]


def rows_of(args: Args, name: str, section: Section, run: Run) -> dict[str, list[dict]]:
    """Name of a table -> its rows of one run"""
    folder = folder_of(args, run)
    if name == "worst":
        teams, curve = read_teams(folder, tables.SETS)
        return {"_teams": teams, "_curves": curve}
    if name == "unseen":
        return {"_teams": read_teams(folder, ("learner-",))[0]}
    if name == "moa":
        return {"_kinds": read_moa(folder)}
    if name == "partners":
        seeds, curve = read_partners(folder)
        found = {"_curves": curve}
    else:
        seeds = [summary_of(path.parent, section.columns) for path in sorted(folder.glob("*/metrics.jsonl"))]
        found = {}
    found[""] = [{"seed": n, **{key: row.get(key, "") for key in section.columns}} for n, row in enumerate(seeds)]
    return found


def collect(args: Args, name: str) -> None:
    """docs/data/NAME*.csv from the folders of the runs. What ran elsewhere stays"""
    section = SECTIONS[name]
    labels = list(section.runs)
    found = {}
    for label, run in section.runs.items():
        if done_file(folder_of(args, run)).exists():
            for kind, rows in rows_of(args, name, section, run).items():
                found.setdefault(kind, []).extend({"run": label, **row} for row in rows)
    for kind, rows in found.items():
        fresh = {row["run"] for row in rows}
        rows += [row for row in read(Path(args.docs), name + kind) if row["run"] not in fresh]
        rows = [row for row in rows if row["run"] in labels]
        rows.sort(key=lambda row: labels.index(row["run"]))
        rows = [{key: f"{x:.5g}" if isinstance(x, float) else x for key, x in row.items()} for row in rows]
        if rows:
            write_csv(Path(args.docs) / "data" / f"{name}{kind}.csv", rows)


# ---- Command line
def main(args: Args) -> None:
    unknown = [name for name in args.section if name not in SECTIONS]
    if unknown:
        sys.exit(f"error: there is no section {unknown[0]}: {', '.join(SECTIONS)}")
    for name in args.section:
        section = SECTIONS[name]
        if args.list:
            print(f"{name}: {section.title}")
            for label, run in section.runs.items():
                print(f"     {label}:", "\n         ".join([command_of(args, run), *run.then]))
        elif not args.draw:
            make_all(args, list(section.runs.values()))
            if name != "first":
                collect(args, name)
    if not args.list:
        for name in args.section:
            tables.draw(Path(args.docs), name)


if __name__ == "__main__":
    main(tyro.cli(Args))
