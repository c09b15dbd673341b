"""The benchmarks measure what they say, and the experiments' tables come from the runs."""

import contextlib
import csv
import json
import re
import shutil
import sys
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
from benchmarks import experiments, sections, speed, tables

import helpers
import pytest
import tyro
from helpers import tiny_args

SCRIPTS = {"hopplus_ppo.py": hopplus_ppo, "hopplus_mcts.py": hopplus_mcts}
SMALL = "--num-envs 4 --num-steps 8 --imagination-horizon 4 --pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8"
SMALL += " --policy-hidden 16 --replay-rollouts 2"


def module_of(script: str):
    folder = experiments.ROOT / Path(script).parent
    name = Path(script).stem
    if folder != experiments.ROOT:
        name = ".".join((*Path(script).parent.parts, name))
    return __import__(name, fromlist=["Args"])


def parse(script: str, words: list[str], monkeypatch):
    module = module_of(script)
    if not hasattr(module, "parse_args"):
        return tyro.cli(module.Args, args=words)
    monkeypatch.setattr(sys, "argv", [script, *words])
    return module.parse_args()


# ---- Speed
@pytest.mark.parametrize(
    ("script", "flags"),
    [("hopplus_ppo.py", "--method ppo"), ("hopplus_mcts.py", "--num-simulations 2 --num-trees 2")],
)
def test_speed_of_an_iteration(script, flags, tmp_path):
    args = speed.Args(flags=f"{flags} {SMALL}", script=script, repeats=1, device="cpu", folder=str(tmp_path))
    (row,) = speed.main(args)
    assert row["env_steps_per_s"] == pytest.approx(32 / row["iteration_ms"] * 1000)
    assert row["agent_steps_per_s"] == pytest.approx(4 * row["env_steps_per_s"])
    stages = [row[f"{name}_ms"] for name in ("rollout", "models", "imagine", "ppo")]
    assert min(stages) >= 0 and sum(stages) == pytest.approx(row["iteration_ms"], rel=0.9)
    (line,) = csv.DictReader((tmp_path / "own.csv").open())
    assert float(line["iteration_ms"]) == pytest.approx(row["iteration_ms"], rel=1e-4)
    assert line["flags"] == args.flags


# ---- What is run
def test_all_flags_of_all_cases_are_understood(monkeypatch):
    found = {case for cases in speed.ITERATIONS.values() for case in cases.values()}
    for section in sections.SECTIONS.values():
        for run in section.runs.values():
            commands = (*run.before, f"{run.script} {run.flags}", *run.then)
            found |= {tuple(command.partition(" ")[::2]) for command in commands}
    assert len(found) > 50
    for script, flags in found:
        words = re.sub(r"OTHERS_\w+", "PPO=a HOP+=b", flags).split()
        parse(script, words, monkeypatch)


@pytest.mark.parametrize("name", sections.SECTIONS)
def test_every_published_run_has_the_flags_of_its_experiment(name):
    """In any order"""
    runs = sections.SECTIONS[name].runs
    path = experiments.ROOT / f"docs/data/section_{name}.csv"
    flags = {row["run"]: sorted(row["flags"].split()) for row in csv.DictReader(path.open())}
    assert list(flags) == list(runs)
    assert flags == {label: sorted(f"{run.script} {run.flags}".split()) for label, run in runs.items()}


def test_hopplus_has_one_setting():
    """Board, game, seats, games at once, steps, seeds and device may differ"""
    may_differ = {"--seed", "--num-seeds", "--log-every", "--num-envs", "--total-timesteps"}
    may_differ |= {"--height", "--width", "--max-wall-pieces", "--num-stags", "--final-time"}
    may_differ |= {"--redraw", "--population", "--seats", "--device"}
    for name, section in sections.SECTIONS.items():
        for label, run in section.runs.items():
            if name != "dose" and label in ("HOP+", "HOP+, 8x8", "HOP+, few steps", "HOP+, 4h2s"):
                flags = set(re.findall(r"--[\w-]+", run.flags))
                assert run.script == "hopplus_ppo.py" and flags <= may_differ, (name, label)


@pytest.mark.parametrize(
    ("script", "method", "changes"),
    [
        (hopplus_ppo, "ppo", {}),
        (hopplus_ppo, "ppo-omg", {"pretraining_updates": 85, "num_envs": 5, "replay_rollouts": 3}),
        (hopplus_mcts, "hopplus-mcts", {"num_simulations": 2, "pretraining_updates": 25, "subgoals": "none"}),
    ],
)
def test_the_games_that_models_learn_from_are_counted(script, method, changes, tmp_path, monkeypatch):
    played = []
    push = script.Games.push

    def counted(games, steps):
        if games.seats.watch:
            played.append(steps["done"].shape[1] * games.seats.num_envs)
        push(games, steps)

    monkeypatch.setattr(script.Games, "push", counted)
    monkeypatch.setattr(script, "train_model", lambda *_, **__: {})
    changes = {"total_timesteps": 160, "num_seeds": 2, "update_epochs": 1, **changes}
    folder, _ = helpers.train_tiny(tmp_path, method, script, **changes)
    args = tiny_args(method, script, **changes)
    saved = json.loads((folder / "args.json").read_text())
    iterations = helpers.lines_of(folder)[-1]["steps"] // (args.num_envs * args.num_steps)
    assert experiments.watched_steps(saved, iterations) == sum(played)
    assert (sum(played) > 0) == (method != "ppo")


def call_here(words, stdout, **_):
    """As subprocess.run, without the seconds that a Python takes to start"""
    module = module_of(words[1])
    with contextlib.redirect_stdout(stdout), pytest.MonkeyPatch.context() as patch:
        module.main(parse(words[1], list(words[2:]), patch))


def test_a_section_from_its_runs_to_its_table(tmp_path, monkeypatch, capsys):
    """The true scripts: pretrained checkpoints, training, what follows; steps and seconds from the start"""
    monkeypatch.setattr(experiments.subprocess, "run", call_here)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the runner's threads may not
    small = "--device cpu --height 3 --final-time 6"
    data = f"{small} --held-out-games 8 --num-seeds 2"
    before = (
        f"pretrain_vae.py --num-samples 300 --epochs 1 --goal-dim 4 --subgoal-hidden 8 {data}",
        f"pretrain_world_model.py --num-transitions 300 --num-updates 2 --wm-hidden 16 {data}",
    )
    flags = f"--total-timesteps 64 --goal-dim 4 {SMALL} {sections.UNPREPARED} --num-seeds 2 --log-every 1"
    then = (f"{sections.EVALUATE} --device cpu --games 4",)
    two = sections.Run(f"{flags} {sections.PREPARED}", then=then, before=before)
    columns = ("all_steps_to_2.8", "after/probe")
    section = sections.Section("?", {"two": two, "none": sections.Run(flags)}, columns)
    monkeypatch.setitem(sections.SECTIONS, "time", section)
    args = experiments.Args(
        run_dir=str(tmp_path / "runs"),
        docs=str(tmp_path / "docs"),
        section=("time",),
        extra=small,
        parallel=1,
    )
    experiments.main(args)
    said = capsys.readouterr().out
    assert "FAILED" not in said, said
    folder = experiments.folder_of(args, two)
    saved = json.loads(next((folder / "2").glob("*/args.json")).read_text())
    assert Path(saved["vae_checkpoint"]).parent == folder / "0"
    assert Path(saved["world_model_checkpoint"]).parent == folder / "1"
    docs = Path(args.docs)
    curve = [row for row in tables.read(docs, "time", "_curves") if row["run"] == "two"]
    seconds = sum(float((folder / f"{number}.seconds").read_text()) for number in (0, 1))
    ready = float(re.search(r"ready after ([\d.]+) s", (folder / "2.log").read_text())[1])
    line = helpers.lines_of(next((folder / "2").glob("*__1__*")))[0]
    expected = seconds + ready + line["steps"] / line["time/SPS"]
    assert float(curve[0]["all_seconds"]) == pytest.approx(expected, rel=1e-3) and seconds > 0
    rows = [row for row in tables.read(docs, "time") if row["run"] == "two"]
    assert all(0 < float(row["before/top1"]) < 1 and 0 <= float(row["after/probe"]) <= 1 for row in rows)
    assert "| run | seeds | return | all_steps_to_2.8 | after/probe |" in said
    monkeypatch.setattr(experiments.subprocess, "run", None)
    experiments.main(args)
    assert "2 of 2: done" in capsys.readouterr().out, "nothing is made twice"


def test_meetings_are_averaged_by_seed(tmp_path):
    there = tmp_path / "x__1"
    there.mkdir()
    rows = [("3 NS", "frozen", 0, 1, 1), ("3 NS", "frozen", 1, 2, 4), ("3 NS", "frozen", 2, 1, 2)]
    rows += [("3 waiting", "learning", 0, 1, 7), ("3 NS", "Bayes hunter", 0, 1, 5), ("3 NS", "Bayes hunter", 1, 1, 6)]
    lines = [",".join(map(str, (*row, row[-1] + 0.5))) for row in rows]
    (there / "adaptation_standard.csv").write_text(
        "\n".join(["co_players,mode,repetition,seed,score,return at 100", *lines])
    )
    found = experiments.adaptations(tmp_path)
    scores = {(row["co_players"], row["mode"], row["seed"]): row["score"] for row in found["_adaptation"]}
    assert (scores["3 NS", "frozen", "1"], scores["3 NS", "frozen", "2"]) == (1.5, 4)
    assert (scores["3 NS", "Bayes hunter", "0"], scores["3 NS", "Bayes hunter", "1"]) == (5, 6), "nobody trained it"
    assert found["_adaptation_curves"] == [{"learner": "learning", "steps": "100", "return": 7.5}]


# ---- Tables
def test_every_published_table_is_printed_and_the_worst_case_drawn(tmp_path, capsys):
    shutil.copytree(experiments.ROOT / "docs/data", tmp_path / "data")
    experiments.main(experiments.Args(docs=str(tmp_path), draw=True))
    said = capsys.readouterr().out
    assert "no data yet" not in said and "| HOP+, few steps | 5 |" in said
    page = (experiments.ROOT / "docs/results.md").read_text()
    for cell in ("3.110 ± 0.010", "2.857 ± 0.011", "0.86 ± 0.04", "0.857 ± 0.042", "2.49 ± 0.14"):
        assert cell in said and cell in page
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"worst_case.png", "three_waiting.png"}
    read = {path.name for path in (tmp_path / "data").glob("section_*")}
    assert all(re.match(rf"section_({'|'.join(sections.SECTIONS)})[_.]", name) for name in read)


def write_timed(folder):
    """PPO ends after 9 s, the search has its steps after 40 s, HOP is then not yet ready"""
    lines = {
        "PPO": [(122_880, 3, 1.0), (500_000, 9, 2.5)],
        "search": [(61_440, 30, 2.0), (122_880, 40, 2.75)],
        "HOP": [(61_440, 50, 1.5), (122_880, 60, 2.25)],
    }
    curve = []
    for run, points in lines.items():
        for seed in (0, 1):
            for steps, seconds, value in points:
                row = {"run": run, "seed": seed, "steps": steps, "all_seconds": seconds}
                curve.append(row | {"return": value + 0.5 * seed})
    tables.write(folder / "data/section_time_curves.csv", curve)
    summary = [{"run": run, "seed": 0, "return": 2.0, "all_seconds_to_2.8": ""} for run in lines]
    summary.append({"run": "PPO", "seed": 1, "return": 3, "all_seconds_to_2.8": 5})
    tables.write(folder / "data/section_time.csv", summary)
    measured = [("PPO, 1 game(s)", 0.25), ("PPO, 4096 game(s)", 1.5), ("search, 1 game(s)", 16.0)]
    tables.write(folder / "data/decisions_gpu.csv", [{"case": case, "milliseconds": ms} for case, ms in measured])


def test_return_after_equal_steps_and_equal_time(tmp_path, capsys):
    write_timed(tmp_path)
    tables.draw(tmp_path, "time")
    said = capsys.readouterr().out
    header = "| run | return after 122880 steps | after 40 s | seconds of the whole run |"
    assert f"{header} ms a decision, 1 game(s) | ms a decision, 4096 game(s) |" in said
    assert "| PPO | 1.250 ± 3.177 | 2.750 ± 3.177, ended | 9 | 0.25 | 1.5 |" in said
    assert "| search | 3.000 ± 3.177 | 3.000 ± 3.177 | 40 | 16 |  |" in said
    assert "| HOP | 2.500 ± 3.177 | not ready | 60 |  |  |" in said
    assert "| search | 1 | 2 [nan, nan] | never |" in said, "no seed reached 2.8, whatever it is measured in"


def met(run, players, seed, score, mode="learning", sets="standard"):
    row = {"run": run, "sets": sets, "co_players": players, "mode": mode, "seed": seed, "score": score}
    return row | {"half_width_95": ""}


def test_the_worst_case(tmp_path, capsys):
    """HOP+: 3 NS 0.75 and 1, 3 waiting 0.75 and 1 in its two seeds; regrets 0.5 and 0, 1 and 0"""
    rows = [
        met("PPO", "3 NS", "", 1, "random"),
        met("PPO", "3 NS", "", 3, "best response"),
        met("HOP+", "3 NS", 11, 2.5),
        met("HOP+", "3 NS", 12, 3),
        met("PPO", "3 NS", 11, 0),
        met("PPO", "3 NS", 0, 3, "Bayes hunter"),
        met("PPO", "3 NS", 1, 2, "Bayes hunter"),
        met("+ subgoals, mixed", "3 NS", 11, 3),
        met("PPO", "3 waiting", "", 1, "random", "strangers"),
        met("PPO", "3 waiting", "", 5, "best response", "strangers"),
        met("HOP+", "3 waiting", 11, 4, sets="strangers"),
        met("HOP+", "3 waiting", 12, 5, sets="strangers"),
        met("PPO", "3 waiting", 11, 3, sets="strangers"),
        met("PPO", "3 waiting", 0, 2, "Bayes hunter", "strangers"),
        met("PPO", "3 waiting", 1, 4, "Bayes hunter", "strangers"),
    ]
    tables.write(tmp_path / "data/section_7_adaptation.csv", rows)
    scale = tables.references(rows)
    assert scale == {("4x4", "3 NS"): (1, 3), ("4x4", "3 waiting"): (1, 5)}
    meetings = tables.read_meetings(rows)
    hopplus = tables.worst_case(meetings["HOP+", "learning"], "4x4", scale)
    spread = 0.125 * 12.7062  # of two values around their mean: Student's t with 1 degree of freedom
    assert hopplus.worst_score == pytest.approx((0.875, spread), rel=1e-4) == hopplus.mean_score
    assert (hopplus.regret_set, hopplus.worst_regret[0]) == ("3 waiting", 0.5)
    scripted = tables.worst_case(meetings["Bayes hunter", "Bayes hunter"], "4x4", scale)
    assert (scripted.worst_set, scripted.worst_score[0]) == ("3 waiting", 0.5), "repetitions are its seeds"
    assert (scripted.mean_score[0], scripted.worst_regret[0]) == (0.625, 2)
    tables.print_worst(tmp_path)
    said = capsys.readouterr().out
    start = "| HOP+, learning | 0.88 ± 1.59 | 3 NS | 0.88 ± 1.59 | 0.50 ± 6.35 | 3 waiting |"
    assert f"{start} 0.88 ± 1.59 | 3 NS | 0.88 ± 1.59 |" in said
    assert "| PPO, learning | -0.50 | 3 NS | 0.00 | 3.00 | 3 NS | -0.50 | 3 NS | -0.50 |" in said
    assert re.search(r"\| Bayes hunter \| 0.50[^|]*\| 3 waiting .*\| 0.75[^|]*\| 3 NS \| 0.75", said)
    assert "+ subgoals" not in said, "it did not meet all"


UNIT = dict.fromkeys([("4x4", "a"), ("4x4", "b")], (0.0, 1.0))


def test_the_worst_is_of_means_not_of_single_seeds():
    """Each of two sets is bad in another seed: the lowest score of all is 0, in b; but the worst set is a, 0.4"""
    returns = {"a": {"1": 0.1, "2": 0.7}, "b": {"1": 1.0, "2": 0.0}}
    worst = tables.worst_case(returns, "4x4", UNIT)
    assert (worst.worst_set, worst.regret_set) == ("a", "a")
    assert worst.worst_score[0] == pytest.approx(0.4) and worst.mean_score[0] == pytest.approx(0.45)


def test_a_mean_is_over_seeds_that_met_all_sets():
    returns = {"a": {"1": 0.2, "2": 0.4, "3": 9.0}, "b": {"1": 0.6, "2": 1.0}}
    worst = tables.worst_case(returns, "4x4", UNIT)
    assert worst.mean_score == pytest.approx((0.55, 12.7062 * 0.15), rel=1e-4)
