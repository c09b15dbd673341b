"""Runs the experiments that answer the project's questions on one GPU, and draws their figures.

    python benchmarks/experiments.py --list
    python benchmarks/experiments.py --section stays-8x8 --parallel 6     # a step of the ladder
    python benchmarks/experiments.py --section others --parallel 5    # learners to be met in 7 and 8
    python benchmarks/experiments.py --section 7 8 --parallel 4
    python benchmarks/experiments.py --section worst     # the worst case in 7 and 8
    python benchmarks/experiments.py --section pretraining moa --parallel 1    # alone: seconds are compared
    python benchmarks/experiments.py --draw        # only tables and figures, from docs/data

A run that is finished is not made again (its folder in --run-dir has a file `finished`), and one that was cut off goes
on from its last checkpoint; sections share runs. HOP+ is hopplus_ppo.py with its defaults everywhere: only the board,
the games at once, the steps and the seeds differ, and in section `dose` the flag that it asks about.

What is run stands in sections.py; tables.py and worst_case.py make tables and figures.

Settings were chosen with seeds 1 to 5
(docs/data/tuning.csv) and are tested with seeds from 11 on; differences are paired by seed, intervals are Student's t.
"""

import concurrent.futures
import dataclasses
import glob
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import tables
from benchmarks.results import read, read_csv, write
from benchmarks.sections import BOARDS, GRU, SECTIONS, Run, Section, label_of, other_runs
from benchmarks.worst_case import HARDEST
from stag_hunt_env import UserError, command_line, parse, refuse

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FOLLOWED = {  # name in our tables: key in metrics.jsonl
    "return": "charts/episodic_return",
    "stag": "charts/stag_share",
    "real_samples": "real/samples",
    "imagined_samples": "imagined/samples",
}


@dataclasses.dataclass
class Args:
    section: tuple[str, ...] = tuple(SECTIONS)
    """which sections"""
    list: bool = False
    """only say what there is"""
    draw: bool = False
    """only draw the figures and print the tables from docs/data"""
    parallel: int = 3
    """commands at once: runs, and what follows them"""
    only: tuple[str, ...] = ()
    """only these runs of the sections"""
    extra: str = ""
    """flags for all runs, for example to try the script on a CPU"""
    extra_before: str = ""
    """the same for what goes before a run"""
    extra_then: str = ""
    """the same for what follows a run"""
    run_dir: str = "runs/experiments"
    """where the runs go"""
    docs: str = str(ROOT / "docs")
    """tables go to data, figures to results in here"""


# ----------------------------------------------------------------------------------------
# Running


def folder_of(args: Args, run: Run) -> Path:
    before = itertools.chain(*run.before)
    words = [run.script, run.flags, *before, *run.then, args.extra, args.extra_then]
    if run.before and args.extra_before:
        words.append(args.extra_before)
    text = " ".join(words)
    name = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return Path(args.run_dir).resolve() / f"{name[:120]}_{zlib.crc32(text.encode()):08x}"


def checkpoints_in(folder: Path) -> list[str]:
    """One, or with ppo_gru.py one for each seed"""
    return sorted(glob.glob(f"{folder}/*/checkpoint.pt"))


def named_others(args: Args, board: str) -> list[str]:
    """NAME=checkpoint of the finished runs of section `others`"""
    words = []
    for name, run in other_runs(board).items():
        folder = folder_of(args, run)
        paths = checkpoints_in(folder)
        missing = not paths or not (folder / "finished").exists()
        label = label_of(name, board)
        refuse(missing, f"{folder}: {label} of --section others is not finished or has no checkpoint")
        words.append(f"{name}={paths[0]}")
    return words


def resolve(args: Args, command: str, checkpoints: list[str]) -> list[str]:
    """The words of a command that follows a run. RUN: its checkpoints. OTHERS_4x4, OTHERS_8x8: the learners of section
    `others` on that board. --extra-then goes before the flags of another script."""
    words = []
    for word in command.split():
        if word == "RUN":
            words += checkpoints
        elif word.startswith("OTHERS_"):
            words += named_others(args, word.removeprefix("OTHERS_"))
        else:
            words.append(word)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *args.extra_then.split(), *words[end:]]


def make(args: Args, run: Run, places: threading.Semaphore) -> None:
    """The run and what follows it. places: how many commands may run at once, with those of other runs"""
    folder = folder_of(args, run)
    if (folder / "finished").exists():
        return
    trained = (folder / "seconds").exists()
    resumable = trained or run.script != GRU  # the baseline saves only at the end
    begun = checkpoints_in(folder) if resumable else []
    if not begun:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
        folder.mkdir(parents=True)

    def call(log: str, *command: str) -> float:
        """-> seconds"""
        with places, open(folder / f"{log}.log", "a") as file:
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], cwd=ROOT, stdout=file, stderr=file, check=True)
            return time.perf_counter() - started

    def follow(number: int, command: str) -> None:
        done = folder / f"then_{number}.done"
        if not done.exists():  # else of an attempt that was cut off later
            call(f"then_{number}", *resolve(args, command, checkpoints_in(folder)))
            done.touch()

    flags = [*run.flags.split(), *args.extra.split(), "--run-dir", str(folder)]
    if run.script != GRU:
        flags += ["--save-seconds", "120"]
    if begun:
        flags = ["--resume", begun[0]]
    elif run.before:
        seconds = 0.0
        for number, (script, script_flags, flag) in enumerate(run.before):
            there = folder / f"before_{number}"
            script_flags = [*script_flags.split(), *args.extra_before.split()]
            seconds += call(f"before_{number}", script, *script_flags, "--run-dir", str(there))
            flags += [flag, checkpoints_in(there)[0]]
        (folder / "seconds_before").write_text(f"{seconds:.1f}")
    if not trained:
        seconds = call("train", run.script, *flags)
        (folder / "seconds").write_text(f"{seconds:.1f}")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for job in [pool.submit(follow, *item) for item in enumerate(run.then)]:
            job.result()
    if not run.keep:
        for path in checkpoints_in(folder):
            Path(path).unlink()
    (folder / "finished").touch()


def needed_first(runs: list[Run]) -> list[Run]:
    """The learners that follow-ups of these runs name"""
    named = {word for run in runs for command in run.then for word in command.split()}
    boards = [board for board in BOARDS if f"OTHERS_{board}" in named]
    return [run for board in boards for run in other_runs(board).values()]


def make_all(args: Args, runs: list[Run]) -> None:
    begun = time.perf_counter()
    places = threading.Semaphore(args.parallel)
    longest_first = sorted(dict.fromkeys(runs), key=lambda run: -len(run.then))
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        jobs = {pool.submit(make, args, run, places): run for run in longest_first}
        for count, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            state = "done"
            error = job.exception()
            if error is not None:
                reason = error if isinstance(error, UserError) else "see its logs"
                state = f"FAILED, {reason}"
            seconds = f"{time.perf_counter() - begun:.0f} s"
            name = folder_of(args, jobs[job]).name
            print(f"{seconds}, {count} of {len(jobs)}: {state}: {name}", flush=True)


# ----------------------------------------------------------------------------------------
# docs/data, from the folders of the runs


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures_of(row: dict) -> dict[str, float]:
    """What we follow, of one line of metrics.jsonl"""
    figures = {name: row[key] for name, key in FOLLOWED.items() if row.get(key) is not None}
    if "moa/nll" in row:
        figures["moa_gap"] = row["moa/nll"] - row["moa/ceiling/nll"]
    return figures


def figures_before(folder: Path) -> list[dict[str, float]]:
    """What pretrain_vae.py found in held-out games, seed by seed"""
    of_seeds = []
    for path in sorted(folder.glob("before_*/*/evaluation/final.csv")):
        found = {row["metric"]: float(row["with history"]) for row in read_csv(path)}
        of_seeds.append({name: found[name] for name in ("probe_accuracy", "top1", "nll")})
    return of_seeds


def watched_steps(flags: dict, iterations: int) -> int:
    """Env steps of rule-based games that the models of a seed have learned from after so many iterations. flags: those
    of a training script, as in args.json"""
    has_world_model = flags["imagination"] or flags.get("planner", "none") != "none"
    infers = flags["subgoals"] != "none"
    if not has_world_model and not infers:
        return 0
    in_preparation = 0
    updates = flags["pretraining_updates"]
    world_model_learns = has_world_model and not flags["world_model_checkpoint"]
    if updates and (world_model_learns or not flags["vae_checkpoint"]):
        rounds = max(1, min(8, updates // 10))
        in_preparation = rounds * flags["pretraining_games"] * flags["num_steps"]
    beside = 0
    if flags["offline_ratio"]:
        rollouts = flags["replay_rollouts"] + math.ceil(iterations / flags["replay_rollouts"])
        beside = rollouts * math.ceil(flags["num_envs"] / 2) * flags["num_steps"]
    return in_preparation + beside


def count_from_the_start(folder: Path, flags: dict, lines: list[dict]) -> None:
    """Adds to each line of metrics.jsonl the steps and seconds since the very start, with those of what went before"""
    steps_before = 0
    for path in folder.glob("before_*.log"):
        steps_before += int(re.search(r"in each seed: (\d+) env steps", path.read_text())[1])
    seconds_before = 0.0
    if (folder / "seconds_before").exists():
        seconds_before = float((folder / "seconds_before").read_text())
    for line in lines:
        iterations = line["steps"] // (flags["num_envs"] * flags["num_steps"])
        line["all_steps"] = steps_before + watched_steps(flags, iterations) + line["steps"]
        line["all_seconds"] = seconds_before + line["time/ready"] + line["time/training"]


def figures_after(folder: Path) -> dict[int, dict[str, float]]:
    """seed -> what subgoals.py says about its subgoals"""
    of_seeds = {}
    for path in folder.glob("*/subgoals_*_seeds.csv"):
        for row in read_csv(path):
            probes = {"after/probe": float(row["probe"]), "after/probe_majority": float(row["majority"])}
            of_seeds[int(row["seed"])] = probes
    return of_seeds


def device_of(log: str) -> str:
    return "cuda" if re.search(r" on (\d+ x )?cuda", log) else "cpu"


def summary_of(lines: list[dict]) -> dict:
    """Of one seed's metrics.jsonl: means over the last fifth, and when returns were reached"""
    figures = [figures_of(line) for line in lines]
    last = figures[-max(1, len(figures) // 5) :]
    row = {"steps": lines[-1]["steps"]}
    for key in last[-1]:
        row[key] = np.mean([f[key] for f in last if key in f])
    fifths = np.array_split([f.get("return", 0.0) for f in figures], min(5, len(figures)))
    means = [part.mean() for part in fifths]
    row["fall"] = max(means) - means[-1]
    # Not in the first line, which may count only games that ended early
    reached = [k for k, f in enumerate(figures) if k > 0 and f.get("return", 0) >= 2.8]
    first = lines[reached[0]] if reached else {}
    row["steps_to_2.8"] = first.get("steps", "")
    row["seconds_to_2.8"] = first.get("time/training", "")
    if "all_steps" in lines[0]:
        row["all_steps_to_2.8"] = first.get("all_steps", "")
        row["all_seconds_to_2.8"] = first.get("all_seconds", "")
    row |= {key: value for key, value in lines[-1].items() if key in ("time/training", "time/ready")}
    return row


def curve_of(lines: list[dict]) -> list[dict]:
    """Return over steps and over time, in up to 40 of its lines"""
    rows = []
    for k in sorted(set(np.linspace(0, len(lines) - 1, 40).astype(int))):
        row = {name: lines[k][name] for name in ("steps", "all_seconds")}
        rows.append(row | {"return": figures_of(lines[k]).get("return", "")})
    return rows


def read_floats(path: Path) -> list[dict]:
    """What has a point as a number, so that few of its digits are written"""
    return [{key: float(x) if "." in x else x for key, x in row.items()} for row in read_csv(path)]


def moa_tables(folder: Path) -> dict[str, list[dict]]:
    """What evaluate.py says about MOA: by kind of co-player and seed, and by kind and action"""
    scores = []
    for path in sorted(folder.glob("*/evaluation_*_moa.csv")):
        scores += [row for row in read_floats(path) if row["seed"] != "all"]
    actions = []
    for path in sorted(folder.glob("*/evaluation_*_moa_actions.csv")):
        actions += read_floats(path)
    return {"_moa": scores, "_moa_actions": actions}


def is_drawn(row: dict) -> bool:
    """Of the curves of adaptation one is, see worst_case.py"""
    return row["co_players"] == HARDEST and row["learner"] == "learning"


def tables_of(folder: Path, run: Run, section: Section) -> dict[str, list[dict]]:
    """name of a table -> its rows of one run"""
    adaptation_tables = ("_adaptation", "_adaptation_repetitions", "_adaptation_curves")
    tables = {name: [] for name in ("", "_curves", *adaptation_tables, "_together")}
    before = figures_before(folder)
    after = figures_after(folder)
    device = device_of((folder / "train.log").read_text())
    for seed, path in enumerate(sorted(glob.glob(f"{folder}/*/metrics.jsonl"))):
        lines = read_lines(Path(path))
        if not lines:
            continue
        if any(name.startswith("all_") for name in section.columns):
            script_flags = json.loads((Path(path).parent / "args.json").read_text())
            count_from_the_start(folder, script_flags, lines)
        flags = f"{run.script} {run.flags}"
        row = {"seed": seed, "device": device, "flags": flags, **summary_of(lines)}
        if before:
            row |= {f"before/{key}": value for key, value in before[seed].items()}
        if after:
            row |= after[sorted(after)[seed]]
        tables[""].append(row)
        if section.curves:
            tables["_curves"] += [{"seed": seed, **row} for row in curve_of(lines)]
    ends = ("", "_repetitions", "_curve")
    for sets, (name, end) in itertools.product(section.sets, zip(adaptation_tables, ends, strict=True)):
        for path in folder.glob(f"*/adaptation_{sets}{end}.csv"):
            tables[name] += [{"sets": sets, **row} for row in read_csv(path)]
    tables["_adaptation_curves"] = [row for row in tables["_adaptation_curves"] if is_drawn(row)]
    for path in folder.glob("*/partners*.csv"):
        population = path.stem.removeprefix("partners").lstrip("_")
        tables["_together"] += [{"population": population, **row} for row in read_csv(path)]
    if section.moa:
        tables |= moa_tables(folder)
    return tables


def collect(args: Args, number: str) -> None:
    """docs/data/section_NUMBER*.csv from the folders of the runs"""
    section = SECTIONS[number]
    labels = list(section.runs)
    tables = {}
    for label, run in section.runs.items():
        folder = folder_of(args, run)
        if not (folder / "seconds").exists():  # not trained to the end
            continue
        for name, rows in tables_of(folder, run, section).items():
            tables.setdefault(name, []).extend({"run": label, **row} for row in rows)
    for name, rows in tables.items():
        fresh = {row["run"] for row in rows}
        # What ran elsewhere stays.
        elsewhere = [row for row in read(Path(args.docs), number, name) if row["run"] not in fresh]
        rows = [row for row in rows + elsewhere if row["run"] in labels]
        rows.sort(key=lambda row: labels.index(row["run"]))
        if rows:
            write(Path(args.docs) / "data" / f"section_{number}{name}.csv", rows)


# ----------------------------------------------------------------------------------------
# Command line


def print_list() -> None:
    for number, section in SECTIONS.items():
        print(f"{number}. {section.title}")
        for label, run in section.runs.items():
            for script, flags, flag in run.before:
                print(f"         before, for {flag}: {script} {flags}")
            print(f"     {label}: {run.script} {run.flags}")
            for command in run.then:
                print(f"         then {command}")


def main(args: Args) -> None:
    if args.list:
        print_list()
        return
    for number in args.section:
        refuse(number not in SECTIONS, f"there is no section {number}: {', '.join(SECTIONS)}")
    labelled = [item for number in args.section for item in SECTIONS[number].runs.items()]
    known = [label for label, _ in labelled]
    for label in args.only:
        refuse(label not in known, f"--only {label}: the runs of these sections are {', '.join(known)}")
    if not args.draw:
        runs = [run for label, run in labelled if not args.only or label in args.only]
        make_all(args, needed_first(runs))
        make_all(args, runs)
        for number in args.section:
            collect(args, number)
    for number in args.section:
        tables.draw(Path(args.docs), number)


def parse_args(words: list[str]) -> Args:
    return parse(Args, {"experiments": Args}, Args(), words)


if __name__ == "__main__":
    command_line(parse_args, main)
