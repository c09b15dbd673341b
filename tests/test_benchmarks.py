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
from evaluation import evaluate
from stag_hunt_env import StagHuntEnv

import helpers
import pytest
import torch
import tyro
from helpers import tiny_args

SMALL = "--num-envs 4 --num-steps 8 --imagination-horizon 4 --pretraining-games 4 --wm-hidden 16 --subgoal-hidden 8"
SMALL += " --policy-hidden 16 --replay-rollouts 2 --update-epochs 1 --wm-updates 1 --subgoal-updates 1"


def module_of(script: str):
    return __import__(script.removesuffix(".py").replace("/", "."), fromlist=["Args"])


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
    (line,) = csv.DictReader((tmp_path / "own.csv").open())
    assert line == row
    figures = {key: float(x) for key, x in row.items() if key != "case"}
    assert figures["env_steps_per_s"] == pytest.approx(32 / figures["iteration_ms"] * 1000, rel=1e-3)
    assert figures["agent_steps_per_s"] == pytest.approx(4 * figures["env_steps_per_s"], rel=1e-3)
    assert {"rollout_ms", "models_ms", "imagine_ms", "ppo_ms"} <= figures.keys()


def test_speed_of_the_game(tmp_path):
    (row,) = speed.main(speed.Args(cases="game", only="8x8", repeats=1, device="cpu", folder=str(tmp_path)))
    assert row["case"] == "8x8, 4096 games" and float(row["env_steps_per_s"]) > 0


def test_random_actions_are_legal_ones_as_often_as_each_other():
    env = StagHuntEnv(num_envs=1)
    legal = env.legal_actions(env.state)
    uniform = torch.rand(20_000, 4, generator=torch.Generator().manual_seed(1))
    env.state = type(env.state)(*(x.expand(20_000, *x.shape[1:]) for x in env.state))
    actions = speed.random_actions(env, uniform)
    for seat in range(4):
        counts = torch.bincount(actions[:, seat], minlength=7)
        assert (counts > 0).tolist() == legal[0, seat].tolist()
        assert helpers.chi_square_p(counts[legal[0, seat]]) > 1e-3


# ---- What is run
def test_all_flags_of_all_cases_are_understood(monkeypatch):
    found = {case for cases in speed.ITERATIONS.values() for case in cases.values()}
    for section in sections.SECTIONS.values():
        for run in section.runs.values():
            commands = (f"{run.script} {run.flags}", *run.then)
            found |= {tuple(command.partition(" ")[::2]) for command in commands}
    assert len(found) > 50
    for script, flags in found:
        for name in re.findall(r"@(\S+)", flags):
            assert name in sections.SECTIONS["first"].runs
        parse(script, flags.split(), monkeypatch)


def test_docs_data_has_tables_of_sections_and_nothing_else():
    names = {path.stem.partition("_")[0]: path for path in experiments.ROOT.glob("docs/data/*")}
    del names["decisions"]
    assert names.keys() <= sections.SECTIONS.keys() - {"first"}
    for name, path in names.items():
        assert set(tables.labels_in(tables.read_csv(path))) <= sections.SECTIONS[name].runs.keys(), path


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


def test_sections_from_their_runs_to_their_tables(tmp_path, monkeypatch, capsys, no_pictures):
    """The true scripts: pretraining, training from it, what follows, docs/data, tables"""
    monkeypatch.setattr(experiments.subprocess, "run", call_here)
    monkeypatch.setattr(tables, "save", lambda *_: None)
    monkeypatch.setattr(evaluate, "STARTS", 4)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # the runner's threads may not
    game = "--device cpu --height 3 --final-time 6 --num-seeds 2"
    vae = f"--num-samples 300 --epochs 1 --goal-dim 4 --subgoal-hidden 8 --held-out-games 8 {game}"
    flags = f"--total-timesteps 64 --goal-dim 4 {SMALL} --pretraining-updates 0 --log-every 1 {game}"
    beside = "--seats learner,random,random,random"
    partners = f"evaluation/partners.py RUN --device cpu --places 4 --games-together 11 {beside}"
    follows = ("evaluation/evaluate.py RUN --device cpu --games 4", partners, f"{partners} --population left_stag")
    learner = sections.Run(sections.PPO, f"{flags} --vae-checkpoint @vae", follows)
    runs = {"HOP+": learner}
    columns = ("steps_to_2.8", "watched_to_2.8", "seconds_to_2.8", "return", "moa_gap")
    small = {
        "first": sections.Section("first", {"vae": sections.Run(sections.VAE, vae)}),
        "pretraining": sections.Section("?", runs, columns),
        "partners": sections.Section("?", runs, sections.PARTNER_COLUMNS),
        "moa": sections.Section("?", runs),
    }
    monkeypatch.setattr(experiments, "SECTIONS", small)
    monkeypatch.setattr(tables, "SECTIONS", small)
    docs = tmp_path / "docs"
    args = experiments.Args(run_dir=str(tmp_path / "runs"), docs=str(docs), section=tuple(small), parallel=1)
    experiments.main(args)
    said = capsys.readouterr().out
    assert "FAILED" not in said, said
    saved = json.loads(next(experiments.folder_of(args, learner).glob("*/args.json")).read_text())
    first = experiments.folder_of(args, small["first"].runs["vae"])
    assert Path(saved["vae_checkpoint"]).parent == first
    rows = tables.read(docs, "pretraining")
    assert len(rows) == 2 and all(row["moa_gap"] for row in rows)
    (together,) = (float(row["game 1"]) for row in tables.read(docs, "partners") if row["seed"] == "0")
    assert together >= 0 and len(tables.read(docs, "partners_curves")) == 11
    assert "shuffled" not in said and "| subgoals of another game | left_stag |" in said, "no column without numbers"
    assert "| learner, HOP+ |" in said
    monkeypatch.setattr(experiments.subprocess, "run", None)
    experiments.main(args)
    assert "1 of 1: done" in capsys.readouterr().out, "nothing is made twice"


def test_meetings_are_averaged_by_seed(tmp_path):
    there = tmp_path / "x__1"
    there.mkdir()
    rows = [("3 NS", "frozen", 0, 1, 1), ("3 NS", "frozen", 1, 2, 4), ("3 NS", "frozen", 2, 1, 2)]
    rows += [("3 waiting", "learning", 0, 1, 7), ("3 NS", "Bayes hunter", 0, 1, 5), ("3 NS", "Bayes hunter", 1, 1, 6)]
    lines = [",".join(map(str, (*row, row[-1] + 0.5))) for row in rows]
    (there / "adaptation_standard.csv").write_text(
        "\n".join(["co_players,mode,repetition,seed,score,return at 100", *lines])
    )
    found, curve = experiments.read_teams(tmp_path, tables.SETS)
    scores = {(row["co_players"], row["mode"], row["seed"]): row["score"] for row in found}
    assert (scores["3 NS", "frozen", "1"], scores["3 NS", "frozen", "2"]) == (1.5, 4)
    assert (scores["3 NS", "Bayes hunter", "0"], scores["3 NS", "Bayes hunter", "1"]) == (5, 6), "nobody trained it"
    assert curve == [{"steps": "100", "return": 7.5}]


# ---- Tables
def test_each_table_of_the_page_is_drawn_again(tmp_path, capsys):
    shutil.copytree(experiments.ROOT / "docs/data", tmp_path / "data")
    experiments.main(experiments.Args(docs=str(tmp_path), draw=True))
    said = capsys.readouterr().out.splitlines()
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        path.name for path in experiments.ROOT.glob("docs/results/*")
    }
    page = (experiments.ROOT / "docs/results.md").read_text()
    rows = 0
    for part in re.split(r"^##+ ", page, flags=re.M)[1:]:
        if not re.search("^At commit", part, re.M):
            for row in re.findall(r"^\|.*\|$", part, re.M):
                assert row.replace("**", "").replace("`", "") in said, row
                rows += 1
    assert rows > 50


def test_when_a_return_was_reached(tmp_path):
    lines = [{"steps": 128 * n, "charts/episodic_return": x} for n, x in enumerate((None, 2.9, 2.7, 2.8, 3.0), 1)]
    lines = [{**line, "time/ready": 5.0, "time/training": line["steps"] / 128} for line in lines]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row = experiments.summary_of(tmp_path, ("seconds_to_2.8",))
    assert row == {"return": 3.0, "steps_to_2.8": 256, "seconds_to_2.8": 7.0}


def test_seeds_that_have_no_number_or_never_get_there():
    rows = [{"run": "PPO", "steps_to_2.8": x} for x in ("never", "100000", "300000")]
    assert tables.cell_of(rows, "PPO", "steps_to_2.8") == "0.200 ± 1.271 (2 of 3 seeds)"
    assert tables.cell_of(rows[:1], "PPO", "steps_to_2.8") == "never"
    assert tables.cell_of([{"run": "PPO", "return": ""}], "PPO", "return") == ""


def met(run, players, seed, score, mode="learning", sets="standard"):
    return {"run": run, "sets": sets, "co_players": players, "mode": mode, "seed": seed, "score": score}


def test_the_worst_case(capsys):
    """HOP+: 3 NS 0.75 and 1, 3 waiting 0.75 and 1 in its two seeds"""
    rows = [
        met("PPO", "3 NS", "", 1, "random"),
        met("PPO", "3 NS", "", 3, "best response"),
        met("HOP+", "3 NS", 11, 2.5),
        met("HOP+", "3 NS", 12, 3),
        met("PPO", "3 NS", 11, 0),
        met("PPO", "3 NS", 0, 3, "Bayes hunter"),
        met("PPO", "3 NS", 1, 2, "Bayes hunter"),
        met("GRU, mixed", "3 NS", 11, 3),
        met("PPO", "3 waiting", "", 1, "random", "strangers"),
        met("PPO", "3 waiting", "", 5, "best response", "strangers"),
        met("HOP+", "3 waiting", 11, 4, sets="strangers"),
        met("HOP+", "3 waiting", 12, 5, sets="strangers"),
        met("PPO", "3 waiting", 11, 3, sets="strangers"),
        met("PPO", "3 waiting", 0, 2, "Bayes hunter", "strangers"),
        met("PPO", "3 waiting", 1, 4, "Bayes hunter", "strangers"),
    ]
    assert tables.references(rows) == {("4x4", "3 NS"): (1, 3), ("4x4", "3 waiting"): (1, 5)}
    found = tables.complete_scores(rows)
    hopplus = tables.worst_case(found["4x4", "HOP+", "learning"])
    spread = 0.125 * 12.7062  # of two values around their mean: Student's t with 1 degree of freedom
    assert hopplus.score == pytest.approx((0.875, spread), rel=1e-4) == hopplus.mean
    scripted = tables.worst_case(found["4x4", "Bayes hunter", "Bayes hunter"])
    assert (scripted.team, scripted.score[0], scripted.mean[0]) == ("3 waiting", 0.5, 0.625)
    tables.print_worst(found)
    said = capsys.readouterr().out
    assert "| HOP+, learning | 0.88 ± 1.59 | 3 NS | 0.88 ± 1.59 | 0.88 ± 1.59 |" in said
    assert "| PPO, learning | -0.50 | 3 NS | 0.00 | -0.50 |" in said
    assert "GRU" not in said, "it did not meet all"


def test_the_worst_is_of_means_not_of_single_seeds():
    """Each of two teams is bad in another seed: the lowest score of all is 0, in b; but the worst team is a, 0.4"""
    worst = tables.worst_case({"a": {"1": 0.1, "2": 0.7}, "b": {"1": 1.0, "2": 0.0}})
    assert worst.team == "a" and worst.score[0] == pytest.approx(0.4) and worst.mean[0] == pytest.approx(0.45)


def test_a_mean_is_over_seeds_that_met_all_teams():
    worst = tables.worst_case({"a": {"1": 0.2, "2": 0.4, "3": 9.0}, "b": {"1": 0.6, "2": 1.0}})
    assert worst.mean == pytest.approx((0.55, 12.7062 * 0.15), rel=1e-4)
