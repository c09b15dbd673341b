"""What is done with a checkpoint: evaluate.py and adapt.py, with the script that made it or a copy."""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import math
import re
import shutil
import sys
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import stag_hunt_env as game
from evaluation import (
    adapt,
    evaluate,
    moa,
    partners,
    runs,
    subgoals,
)
from stag_hunt_env import HUNT_HARE, STAY, StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import TINY_RUN, write_checkpoint
from torch.nn import functional as F

ROOT = Path(game.__file__).resolve().parent
CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    **TINY_RUN,
    "config": CONFIG,
    "update_epochs": 2,
    "imagination_horizon": 4,
    "num_seeds": 2,
}
FAST = ["--steps", 32, "--every", 8, "--repetitions", 6, "--imagined-games", 4, "--rounds", 1]
FAST += ["--update-epochs", 1, "--num-minibatches", 1, "--subgoal-updates", 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run of two seeds: its two folders"""
    args = hopplus_ppo.make_args("hopplus", "cpu", **TINY, run_dir=str(tmp_path_factory.mktemp("runs")))
    first = Path(hopplus_ppo.main(args)["checkpoint"]).parent
    (second,) = (folder for folder in first.parent.iterdir() if folder != first)
    return first, second


@pytest.fixture
def folder(run, tmp_path):
    """The run's first folder, a copy"""
    return Path(shutil.copytree(run[0], tmp_path / "run"))


FILM = evaluate.film


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Of MOA: see test_moa.py"""
    monkeypatch.setattr(evaluate, "film", lambda run, state, path: path.touch())
    monkeypatch.setattr(moa, "draw", lambda path, *_: Path(path).touch())


def untrained(folder, method="ppo", stays=None, seed=1, script=hopplus_ppo, **changes):
    """A checkpoint of learners that act at random, or, where `stays` [M], do nothing but stay"""
    args = script.make_args(method, "cpu", **{**TINY, **changes}, seed=seed)
    table = game.seats_table(args.seats, args.config.num_players)
    seeds = list(range(seed, seed + args.num_seeds))
    state = script.make_train_state(args, [table] * args.num_seeds, seeds, torch.device("cpu"))
    if stays is not None:
        last = max(name for name in state.networks.policy.params if name.startswith("actor") and name.endswith("bias"))
        for name, p in state.networks.policy.params.items():
            p.data.zero_()
            if name == last:
                p.data[:, STAY] = 100.0 * torch.tensor(stays)
    content = {"format": script.FORMAT, "args": dataclasses.asdict(args), "states": [state.state_dict()]}
    content["script"] = {"name": Path(script.__file__).name, "sha256": "of another version"}
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder / "checkpoint.pt", content)
    return folder / "checkpoint.pt"


def read(module, *words):
    return module.parse_args([str(word) for word in words])


def call(module, *words):
    return module.main(read(module, *words))


def table_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def watch(args, name, seen):
    """Records the arguments and the result of each call of the script's function"""
    function = getattr(args.run.script, name)

    def watched(*given, **more):
        found = function(*given, **more)
        seen.append((given, found))
        return found

    setattr(args.run.script, name, watched)


def weights(network):
    return {name: p.clone() for name, p in network.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------------------------------------------------------------
# Loading


def test_a_checkpoint_and_the_folders_of_all_seeds_give_the_same(run):
    words = ["--games", 4, "--seats", "learner,random,nearest_hare"]
    first, second, checkpoint = (call(evaluate, path, *words) for path in (*run, run[0] / "checkpoint.pt"))
    assert first == second == checkpoint
    written = {path.name for folder in run for path in folder.glob("evaluation_*")}
    ends = (".csv", ".gif", "_moa.csv", "_moa_actions.csv", "_moa.png", "_world_model.csv")
    assert written == {f"evaluation_learner-random-nearest_hare{end}" for end in ends}
    assert not list(run[1].glob("evaluation_*")), "beside the checkpoint"


def test_learners_are_loaded_one_by_one(tmp_path):
    """Each row of each network is another one; learner m gets row index[m]."""
    path = untrained(tmp_path, "hopplus")
    run = read(evaluate, path).run
    index = [5, 0, 3]
    state = runs.seat_learners(run, [["learner"] * 3], 7, index)
    for name, network in state.networks.present().items():
        saved = run.networks[name]
        assert equal(network.state_dict(), {key: p[index] for key, p in saved.items()}), name
    first = run.checkpoint["states"][0]["networks"]["policy"]["actor.weight"]
    assert all((first[a] != first[b]).any() for a, b in itertools.combinations(range(6), 2))


def test_the_learner_that_sat_there(tmp_path):
    saved = {"seats": "random,learner,learner", "share_parameters": False, "config": {"num_players": 3}}
    number = {(seed, seat): runs.learner_index({"args": saved}, seed, seat) for seed in (0, 1) for seat in (1, 2)}
    assert number == {(0, 1): 0, (0, 2): 1, (1, 1): 2, (1, 2): 3}
    with pytest.raises(game.UserError, match=r"--seats: seat 0 was not a learner .* random,learner,learner"):
        runs.learner_index({"args": saved}, 0, 0)
    assert runs.learner_index({"args": {**saved, "share_parameters": True}}, 1, 0) == 1


def test_an_edited_copy_is_loaded_and_said_to_be_one(folder, tmp_path, capsys):
    text = (ROOT / "hopplus_ppo.py").read_text()
    copy = tmp_path / "my_copy.py"
    copy.write_text(text.replace("self.actor(actor_x).float()", "100 * self.actor(actor_x).float()"))
    assert copy.read_text() != text
    here, there = (read(evaluate, folder, "--games", 8, *more) for more in ([], ["--script", copy]))
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"{copy} is not, or no longer, the hopplus_ppo.py that made" in said
    assert (here.run.script.__file__, there.run.script.__file__) == (str(ROOT / "hopplus_ppo.py"), str(copy))
    assert evaluate.main(here) != evaluate.main(there), "more decided"


def error_of(module, *words):
    """What a command line says, which must be one line and end with exit code 2"""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["evaluation", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            game.command_line(module.parse_args, module.main)
    text = said.getvalue()
    assert stop.value.code == 2 and text.startswith("error: ") and text.count("\n") == 1, text
    return text


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of plain PPO"""
    return untrained(tmp_path_factory.mktemp("small") / "run")


def test_wrong_flags_are_named(small, tmp_path):
    refused = [
        (evaluate, ["--", "--height", 5], r"checkpoint.pt: .*encoder.table .*\[6, 200, 32\].*\[6, 344, 32\]"),
        (evaluate, ["--", "--num-players", 4], r"--num-players: .*checkpoint.pt was trained with 3"),
        (evaluate, ["--", "--subgoals", "actions"], r"checkpoint.pt has no prior network .*--method: ppo"),
        (evaluate, ["--script", tmp_path / "nowhere.py"], "nowhere.py; .* made by hopplus_ppo.py: --script"),
    ]
    before = sorted(small.parent.iterdir())
    for module, words, sentence in refused:
        text = error_of(module, small, *words)
        assert re.search(sentence, text), (text, sentence)
    assert sorted(small.parent.iterdir()) == before, "nothing is written"


def test_seats_steps_and_runs_that_do_not_fit_are_named(small, tmp_path):
    seated = untrained(tmp_path / "seated", seats="learner,mixed,learner")
    hop = untrained(tmp_path / "hop", "hop", script=hopplus_mcts, goal_dim=2, num_seeds=1)
    ppo, two, hop = (load(path) for path in (small, seated, hop))
    short = {"seats": ("learner,random,random",), "steps": 32, "every": 8}
    refused = [
        (evaluate, ppo, {"seats": "random,random,random"}, "--seats random,random,random: there is no learner"),
        (evaluate, two, {"seats": "random,learner,random"}, "--seats: seat 1 was not a learner"),
        (adapt, ppo, {}, "--sets standard has 3 co-players, this game has 2: use --seats"),
        (adapt, ppo, {"seats": ("learner,mixed,random",)}, "--seats needs one learner and named co-players"),
        (adapt, ppo, short | {"every": 5}, "--steps must be a multiple of --every"),
        (adapt, ppo, short | {"every": 4, "steps": 16}, "--steps .* a game of 6 steps"),
        (subgoals, hop, {}, r"checkpoint.pt: .* reads no subgoals \(--method hop\)"),
    ]
    for module, loaded, flags, sentence in refused:
        text = refusal(module.main, module.Args(path=str(loaded.path), run=loaded, **flags))
        assert re.search(sentence, text), (text, sentence)


def refusal(function, *given):
    """The sentence that it refuses with"""
    with pytest.raises(game.UserError) as error:
        function(*given)
    assert "\n" not in str(error.value)
    return str(error.value)


def load(path):
    return runs.load_run(evaluate.Args(path=str(path), device="cpu"), [])


def partners_of(path):
    partners.main(partners.Args(paths=(str(path),), device="cpu"))


def test_what_is_no_checkpoint_is_named(small, tmp_path):
    """Also one with an object, which might run code"""
    torch.save({"format": "ppo-gru-2", "more": Path("x")}, tmp_path / "object.pt")
    (tmp_path / "cut.pt").write_bytes(small.read_bytes()[:500])
    for use in (load, partners_of):
        for name in ("object.pt", "cut.pt", "missing.pt"):
            assert str(tmp_path / name) in refusal(use, tmp_path / name), name


def test_flags_after_the_dashes_are_the_script_s(small):
    args = read(evaluate, small, "--games", 3, "--", "--gamma", "0.5", "--no-anneal-lr")
    assert (args.games, args.run.args.gamma, args.run.args.anneal_lr) == (3, 0.5, False)
    assert args.run.args.policy_hidden == 16, "the others are the checkpoint's"


def test_what_cannot_be_written_is_said_before_a_game_is_played(folder, monkeypatch):
    monkeypatch.delattr(game.StagHuntEnv, "advance")
    (folder / "adaptation_learner-random-random_curve.csv").mkdir()
    args = read(adapt, folder, *FAST, "--seats", "learner,random,random")
    assert refusal(adapt.main, args).endswith("_curve.csv cannot be written: Is a directory")


# ---------------------------------------------------------------------------------------------------------------------
# evaluate.py


@pytest.mark.parametrize("seats", ["learner,nearest_hare,mixed", "learner,learner,learner"])
def test_the_first_games_of_each_place_count(seats, tmp_path):
    """300 games a seed are two games in each of 150 places; whatever else ends there does not count. And nothing is
    forgotten at random between them, as it is in training."""
    config = dataclasses.replace(CONFIG, steps_after_first_hunt=0)
    path = untrained(tmp_path, "ppo-omg", config=config, history_reset_prob=1.0)
    args, seen = read(evaluate, path, "--games", 300, "--seats", seats), []
    watch(args, "rollout", seen)
    found = evaluate.main(args)
    first = seen[0][1][0]
    next_games = first.history[:, 1:][first.time[:, 1:] == 0]  # what they begin with
    assert len(next_games) > 100 and next_games.flatten(1).any(1).all() == ("mixed" not in seats)
    episodes = [episodes for (_, games, *_), (_, _, episodes) in seen if games.env.num_envs == 300]
    done, returns, prey = (torch.cat([e[name] for e in episodes]) for name in ("done", "return", "prey"))
    assert done.sum(0).min() >= 2 and done.sum(0).max() > 2, "games of different lengths"
    rows = table_of(tmp_path / f"evaluation_{seats.replace(',', '-')}.csv")
    *rows, team = rows
    assert [row["player"] for row in rows] == seats.split(",") and team["seat"] == "team"
    learners = [float(row["return"]) for row in rows if row["player"] == "learner"]
    assert float(team["return"]) == pytest.approx(np.mean(learners)) == pytest.approx(found["return/learners"])
    assert {row["interval_over"] for row in (*rows, team)} == {"games"}, "two seeds are too few"
    for seat, row in enumerate(rows):
        means, stags, of_places = [], [], []
        for places in (range(150), range(150, 300)):
            ends = [(t, b) for b in places for t in done[:, b].nonzero().flatten().tolist()[:2]]
            means.append(sum(float(returns[t, b, seat]) for t, b in ends) / 300)
            stags.append(sum(int(prey[t, b, seat]) == 5 for t, b in ends) / 300)
            pairs = np.array([float(returns[t, b, seat]) for t, b in ends]).reshape(150, 2)
            of_places.append(pairs.mean(1))
        half = 1.9680 * math.sqrt(sum(np.var(x, ddof=1) / 150 for x in of_places)) / 2  # Student's t, 298 degrees
        assert (
            float(row["return"])
            == pytest.approx(sum(means) / 2, rel=1e-5)
            == pytest.approx(found[f"return/player_{seat}"])
        )
        assert float(row["half_width_95"]) == pytest.approx(half, rel=1e-3, abs=1e-9)
        assert float(row["stag_share"]) == pytest.approx(sum(stags) / 2)


def test_everybody_sits_where_it_learned(tmp_path):
    """Of seed 0 only the learner of seat 2 ever moves, of seed 1 nobody does."""
    path = untrained(tmp_path, stays=[True, True, False, True, True, True])
    found = call(evaluate, path, "--games", 512)
    assert found["return/player_0"] == found["return/player_1"] == 0 and found["return/player_2"] > 0.05
    other = call(evaluate, path, "--games", 64, "--seats", "learner,waiting,noisy_hare")
    assert other["return/player_0"] == other["return/player_1"] == 0 and other["return/player_2"] > 0.6
    assert len(list(tmp_path.glob("evaluation_*.csv"))) == 2, "the second does not overwrite the first"


def test_one_learner_for_all_seats_of_a_seed(tmp_path):
    path = untrained(tmp_path, share_parameters=True, stays=[False, True])
    found = call(evaluate, path, "--games", 300, "--seats", "learner,random,learner")
    assert min(found["return/player_0"], found["return/player_2"]) > 0.05
    only = call(evaluate, untrained(tmp_path, share_parameters=True, stays=[True, True]), "--games", 300)
    assert set(only.values()) == {0.0}


def test_the_gif_shows_who_does_what(tmp_path, monkeypatch):
    frames, render = [], game.render_rgb

    def watched(config, state, returns, names, hunting=None):
        frames.append((int(state.time[0]), names, hunting))
        return render(config, state, returns, names=names, hunting=hunting)

    monkeypatch.setattr(evaluate, "film", FILM)
    monkeypatch.setattr(evaluate.game, "render_rgb", watched)
    path = untrained(tmp_path, stays=[True] * 6)
    call(evaluate, path, "--games", 2, "--seats", "nearest_hare,learner,waiting")
    shown = [(time, hunting.tolist()) for time, _, hunting in frames if hunting is not None]
    assert all(names == ["nearest_hare", "learner", "waiting"] for _, names, _ in frames)
    assert sum(time == 0 for time, _ in shown) == 3, "three games"
    assert all(actions[1] == STAY and actions[2] < 5 for _, actions in shown)
    assert sum(actions[0] == HUNT_HARE for _, actions in shown) == 3, "one catch a game"
    assert (tmp_path / "evaluation_nearest_hare-learner-waiting.gif").stat().st_size > 1000


def test_the_gif_is_of_one_seed_with_everybody_in_its_own_seat(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(evaluate, "film", lambda run, state, path: (shown.append(state), path.touch()))
    args = read(evaluate, untrained(tmp_path), "--games", 2, "--seats", "learner,random,learner")
    evaluate.main(args)
    (state,) = shown
    of_first_seed = {name: p[[0, 2]] for name, p in args.run.networks["policy"].items()}
    assert equal(state.networks.policy.state_dict(), of_first_seed)


def test_two_seeds_give_an_interval_over_games_and_three_one_over_seeds():
    first, second, third = [1.0, 3.0, 2.0, 2.0], [5.0, 5.0, 7.0, 7.0], [3.0, 3.0, 3.0, 3.0]
    mean, half, over = runs.interval_of_places([first])
    assert (mean, half, over) == (*runs.interval(first), "games")
    mean, half, over = runs.interval_of_places([first, second])
    error = math.sqrt((2 / 3 + 4 / 3) / 4) / 2  # of the mean of two means of four
    assert mean == 4 and half == pytest.approx(2.44691 * error, rel=1e-5) and over == "games"
    mean, half, over = runs.interval_of_places([first, second, third])
    assert (mean, half, over) == (*runs.interval([2.0, 6.0, 3.0]), "seeds")
    assert math.isnan(runs.interval_of_places([[1.0], [2.0]])[1])
    assert "over games" in runs.interval_text("games") and "over seeds" in runs.interval_text("seeds")


def test_the_interval():
    mean, half = runs.interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3 and half == pytest.approx(2.77645 * math.sqrt(2.5 / 5), rel=1e-5)
    assert runs.interval([4.0])[0] == 4 and math.isnan(runs.interval([4.0])[1])


def test_a_run_without_search_is_evaluated_with_it(tmp_path):
    path = untrained(tmp_path, "hopplus")
    words = ["--script", ROOT / "hopplus_mcts.py", "--", "--planner", "mcts", "--num-simulations", 2]
    args = read(evaluate, path, "--games", 2, *words)
    assert args.run.args.planner == "mcts" and args.run.args.policy_hidden == 16
    assert all(0 <= value <= 5 for value in evaluate.main(args).values())
    assert (tmp_path / "evaluation_learner-learner-learner_mcts.csv").exists()


# ---------------------------------------------------------------------------------------------------------------------
# adapt.py


def test_the_sets():
    class FourPlayers:
        args = hopplus_ppo.make_args("ppo", "cpu")

    sets = adapt.co_player_sets(adapt.Args(run=FourPlayers))
    assert list(sets.items())[3] == ("NS + 2 NH", ("nearest_stag", "nearest_hare", "nearest_hare")) and len(sets) == 7
    assert (
        sets["NS + NH + random"] == ("nearest_stag", "nearest_hare", "random") and sets["3 random"] == ("random",) * 3
    )
    sets = adapt.co_player_sets(adapt.Args(run=FourPlayers, sets="strangers"))
    assert len(sets) == 6 and sets["3 waiting"] == ("waiting",) * 3
    assert sets["noisy NS + 2 noisy NH"] == ("noisy_stag", "noisy_hare", "noisy_hare")
    assert sets["switching + waiting + random"] == ("switching", "waiting", "random")
    for players in sets.values():
        game.seats_table(["learner", *players], 4)


def test_adaptation(folder, capsys, monkeypatch):
    monkeypatch.setattr(adapt, "BEST_RESPONSE_GAMES", 32)
    args = read(adapt, folder, *FAST, "--seats", "learner,nearest_hare,random", "random,learner,nearest_stag",
                "--modes", "frozen", "learning", "--best-response-steps", 32)  # fmt: skip
    states, rollouts, imagined, updates = [], [], [], []
    for name, seen in (
        ("make_train_state", states),
        ("rollout", rollouts),
        ("imagine", imagined),
        ("ppo_update", updates),
    ):
        watch(args, name, seen)
    found = adapt.main(args)
    sets = ["nearest_hare + random", "nearest_stag + random"]
    rows = ("random", "Bayes hunter", "frozen", "learning", "best response")
    assert set(found) == {f"{name}/{key}" for name in rows for key in sets}
    assert all(0 <= value <= 5 for value in found.values())
    assert found["Bayes hunter/nearest_stag + random"] > 4, "in every seat it hunts with its partner"
    for (_, tables, *_), _ in states[:3]:
        assert len(tables) == 12
        for r, table in enumerate(tables):
            others = ["nearest_hare", "random"] if r < 6 else ["nearest_stag", "random"]
            assert [table[(r + k) % 3] for k in range(3)] == ["learner", *others], "the learner sits in seat r mod N"
    assert states[3][0][1] == [["learner", other, "random"] for other in ("nearest_hare", "nearest_stag")]
    saved = args.run.checkpoint["states"][0]["networks"]["policy"]
    frozen = states[1][1].networks.policy.state_dict()
    assert equal(frozen, {name: p[[0, 1, 2, 3, 4, 5] * 2] for name, p in saved.items()}), "every learner of both seeds"
    assert not any(p.any() for p in states[0][1].networks.policy.state_dict().values())
    _, (_, outputs, _) = rollouts[0]
    legal = outputs["legal"]
    torch.testing.assert_close(outputs["log_probs"].exp(), legal / legal.sum(-1, keepdim=True), msg="uniform")
    title = "adaptation_learner-nearest_hare-random_random-learner-nearest_stag"
    rows, repetitions = table_of(folder / f"{title}.csv"), table_of(folder / f"{title}_repetitions.csv")
    _, (_, _, episodes) = rollouts[3 * 3 + 1]  # random, frozen, learning; the last of four rounds
    for k, key in enumerate(sets):
        done, returns = (episodes[name].unflatten(1, (2, 6, 8))[:, k] for name in ("done", "return"))  # [T, 6, E]
        scores = [float(returns[:, r, :, r % 3][done[:, r]].mean()) for r in range(6)]
        assert found[f"frozen/{key}"] == pytest.approx(sum(scores) / 6), "the last quarter"
        own = [row for row in repetitions if row["co_players"] == key]
        assert [float(row["frozen"]) for row in own] == pytest.approx(scores, rel=1e-5)
        assert [(int(row["repetition"]), int(row["seat"]), int(row["seed"])) for row in own] == [
            (0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 0, 2), (4, 1, 2), (5, 2, 2)
        ]  # fmt: skip
    assert [row["co_players"] for row in rows] == sets and (folder / f"{title}.png").stat().st_size > 1000
    for key, row in zip(sets, rows, strict=True):
        low, high = found[f"random/{key}"], found[f"best response/{key}"]
        assert float(row["learning mean"]) == pytest.approx(found[f"learning/{key}"])
        assert float(row["frozen normalised"]) == pytest.approx((found[f"frozen/{key}"] - low) / (high - low))
    points = table_of(folder / f"{title}_curve.csv")
    assert [int(p["steps"]) for p in points][:4] == [8, 16, 24, 32] and len(points) == 4 * 2 * 4
    assert all(samples["reward"].shape == (12, 6, 4) for _, samples in imagined), (
        "whole games, beyond training's 4 steps"
    )
    learned = [given[3] for given, _ in updates if (given[3]["real"] == 0).all()]
    assert len(learned) == 4 and all(torch.equal(x["critic_weight"], x["weight"]) for x in learned), "the critic too"
    said = capsys.readouterr().out
    assert "2 set(s) of co-players x 6 repetitions x 32 steps, 4 rounds" in said and "minutes to go on cpu" in said


def adaptation(path, mode="learning", repetitions=2, **flags):
    """The parts of an adaptation to one set"""
    words = [path, *FAST, "--repetitions", repetitions, "--seats", "learner,random,nearest_hare"]
    args = read(
        adapt, *words, *(str(word) for pair in flags.items() for word in (f"--{pair[0].replace('_', '-')}", pair[1]))
    )
    tables, index = adapt.deal_seats(args, adapt.co_player_sets(args))
    args.games_at_once = 2
    imagination = mode != "frozen" and "world" in args.run.networks
    state = adapt.make_state(args, args.run, tables, index, imagination)
    boards = adapt.first_boards(args.run, index) if imagination else None
    return args, state, lambda: adapt.adaptation_loop(args, args.run, state, tables, boards, mode)


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_what_was_earned_is_the_learners(method, run, tmp_path):
    path = run[0] if method == "hopplus" else untrained(tmp_path)
    args, state, loop = adaptation(path, mode="frozen", repetitions=6)
    seen = []
    watch(args, "rollout", seen)
    before = {name: weights(x) for name, x in state.networks._asdict().items() if x is not None}
    rounds = list(loop())
    curve = np.array([earned for earned, _ in rounds])  # [rounds, M, 2]
    for number, (_, (_, _, episodes)) in enumerate(seen):
        for m in range(6):
            ends = [(t, 2 * m + e) for e in range(2) for t in episodes["done"][:, 2 * m + e].nonzero().flatten()]
            expected = sum(float(episodes["return"][t, place, m % 3]) for t, place in ends)
            assert curve[number, m] == pytest.approx([expected, len(ends)])
    assert curve.shape == (4, 6, 2) and curve[..., 1].sum() >= 48
    after = {name: weights(x) for name, x in state.networks._asdict().items() if x is not None}
    assert all(equal(before[name], after[name]) for name in before), "frozen"


def test_intervals_are_over_training_seeds_and_dreamers_are_warned_of(folder, monkeypatch, capsys):
    """Known scores of 9 repetitions (2 seeds x 3 seats, then seed 1 again) go through main's statistics."""
    random = np.random.default_rng(5)
    words = ["--seats", "learner,random,random", "learner,nearest_hare,random", "--repetitions", 9]
    args = read(adapt, folder, *FAST, *words, "--modes", "frozen", "learning")
    names = ("random", "Bayes hunter", "frozen", "learning")
    scores = {name: random.uniform(0, 2, (2, 9)) for name in names}
    dreams = np.concatenate([scores["learning"][0] + 0.51, scores["learning"][1] + 0.49])  # 0.5: a tenth of 5

    def loop(name):
        for number in range(4):
            games = random.integers(1, 4, 18)
            earned = scores[name].flatten() if number == 3 else random.uniform(0, 9, 18)
            told = {"policy changed": torch.arange(18) % 2 == 0}
            imagined = torch.tensor(dreams if number == 2 else 0 * dreams)  # in round 2 for round 3
            told |= {"imagined return": imagined} if name == "learning" else {}
            told["test steps"] = torch.arange(18) * (number + 1) * (name == "learning")
            yield np.stack([earned * games, games], 1), told

    def best_responses(*_):
        yield None
        yield np.array([[4.0, 2.0, 3.0], [1.0, 1.0, 4.0]])

    monkeypatch.setattr(adapt, "make_loops", lambda *_: {name: loop(name) for name in names})
    monkeypatch.setattr(adapt, "best_responses", best_responses)
    found = adapt.main(args)
    title = "adaptation_learner-random-random_learner-nearest_hare-random"
    for m, row in enumerate(table_of(folder / f"{title}_repetitions.csv")):
        assert (int(row["frozen test steps"]), int(row["learning test steps"])) == (0, 4 * m)
    for k, row in enumerate(table_of(folder / f"{title}.csv")):
        for name in ("frozen", "learning"):
            means = scores[name][k][[0, 1, 2, 6, 7, 8]].mean(), scores[name][k][3:6].mean()
            assert float(row[f"{name} mean"]) == pytest.approx(sum(means) / 2), name
            assert float(row[f"{name} half_width_95"]) == pytest.approx(
                12.7062 * abs(means[0] - means[1]) / 2, rel=1e-4
            )
        for name in ("random", "Bayes hunter"):
            half = 2.306 * scores[name][k].std(ddof=1) / 3
            assert float(row[f"{name} half_width_95"]) == pytest.approx(half, rel=1e-4), "over repetitions"
        assert float(row["best response half_width_95"]) == pytest.approx((2.4841, 4.3027)[k], rel=1e-4)
        assert float(row["learning imagined mean"]) - float(row["learning mean"]) == pytest.approx((0.51, 0.49)[k])
        assert row["learning warning"] == ("1", "0")[k]
        assert [float(row[f"{name} test steps"]) for name in ("frozen", "learning")] == [0, 4 * (9 * k + 4)]
        low, high = float(row["random mean"]), (3, 2)[k]
        for name in ("Bayes hunter", "frozen", "learning"):
            expected = (float(row[f"{name} mean"]) - low) / (high - low)
            assert float(row[f"{name} normalised"]) == pytest.approx(expected)
    assert found["best response/random + random"] == 3
    said = capsys.readouterr().out
    assert f"{found['learning/random + random']:.3f}" in said and f"({expected:.2f})" in said
    (line,) = (line for line in said.splitlines() if line.startswith("warning"))
    assert line.startswith("warning: learning, random + random: imagined return ") and "new weights in 56% of" in line
    gains = [scores["learning"][k] - scores["frozen"][k] for k in range(2)]
    means = gains[1][[0, 1, 2, 6, 7, 8]].mean(), gains[1][3:6].mean()
    text = f"nearest_hare + random {sum(means) / 2:.3f} ± {12.7062 * abs(means[0] - means[1]) / 2:.3f}"
    assert text in said.splitlines()[-2], "differences are paired"
    line = "test steps of each repetition, real ones beside the 32 that count: frozen 0, learning 34"
    assert said.splitlines()[-1] == line


def test_a_best_response_is_scored_in_new_games(tmp_path, monkeypatch):
    words = ["--seats", "learner,random,random", "learner,nearest_hare,random"]
    args = read(adapt, untrained(tmp_path), *FAST, *words)
    calls = []

    def play_games(run, state, each, skip=0):
        calls.append((each, skip))
        returns = np.full((2, 2, 3), 7.0)
        returns[:, :, 0] = each * np.array([[4, 2], [1, 2]])
        return {"return": returns}

    monkeypatch.setattr(adapt, "BEST_RESPONSE_GAMES", 2)
    monkeypatch.setattr(adapt, "play_games", play_games)
    (best,) = adapt.best_responses(args, args.run, adapt.co_player_sets(args), 0)
    assert best.tolist() == [[4, 2], [1, 2]]
    assert calls == [(4, 1)], "without the games that training leaves half played"
    rates = []
    args.run.script.train_iteration = lambda state, *_: rates.append(
        float(state.optimizers["policy"].param_groups[0]["lr"])
    )
    list(adapt.best_responses(args, args.run, adapt.co_player_sets(args), 3))
    assert rates == pytest.approx([1e-3, 7e-4, 4e-4]), "their learning rate falls"


def test_a_learner_that_was_alone_sits_in_all_seats(tmp_path):
    """Of seed 1 the only learner stays for ever, of seed 2 it acts at random."""
    path = untrained(tmp_path, seats="learner,mixed,mixed", stays=[True, False])
    words = ["--seats", "learner,waiting,waiting", "--no-references", "--modes", "frozen", "--repetitions", 24]
    found = call(adapt, path, *FAST, *words)
    rows = table_of(tmp_path / "adaptation_learner-waiting-waiting_repetitions.csv")
    earned = {seed: [float(row["frozen"]) for row in rows if row["seed"] == seed] for seed in "12"}
    assert earned["1"] == [0] * 12 and sum(earned["2"]) > 0.5
    assert {(row["seed"], row["seat"]) for row in rows} == {(seed, seat) for seed in "12" for seat in "012"}
    assert found["frozen/waiting + waiting"] == pytest.approx(sum(earned["2"]) / 24, rel=1e-5)


def test_without_a_world_model_real_games_decide(small, monkeypatch):
    better = [False, True]
    args, state, loop = adaptation(small)
    env, policy, judged, played, learned = state.games.env, state.networks.policy, [], [], []
    before, rollout, update = weights(policy), args.run.script.rollout, args.run.script.ppo_update

    deals = [env.state.prey_position.clone()]  # of all three kinds of games: played, practised, held out

    def play_games(run, other, each, skip, play_on):
        assert other.networks is state.networks and other.games.env is not env
        deals.append(other.games.env.state.prey_position.clone())
        assert (other.games.env.num_envs, each, skip) == (2 * 4, 1, 1)
        judged.append(weights(policy))
        pay = torch.tensor([3.0 if b and len(judged) % 2 else 1.0 for b in better])
        returns = torch.full((2, 4, 3), 9.0)
        returns[0, :, 0], returns[1, :, 1] = pay[0], pay[1] + torch.tensor([0.1, -0.1, 0.1, -0.1])  # seats 0 and 1
        return {"return": returns.double().numpy(), "steps": np.full(returns.shape, 16.0)}

    def played_out(flags, games, *given, **more):
        if games is not state.games:
            deals.append(games.env.state.prey_position.clone())
        found = rollout(flags, games, *given, **more)
        played.append((games is state.games, weights(policy), found[0].joint[..., 0]))
        return found

    def updated(flags, given, optimizer, batch):
        assert torch.equal(batch["action"], played[-1][2].flatten(1)) and not played[-1][0], "learns from practice"
        learned.append((update(flags, given, optimizer, batch), weights(policy))[1])

    monkeypatch.setattr(adapt, "play_games", play_games)
    args.run.script.rollout, args.run.script.ppo_update = played_out, updated
    *_, (_, metrics) = loop()
    assert metrics["policy changed"].tolist() == better and len(judged) == 8 and len(learned) == 4
    assert metrics["held-out return"].tolist() == pytest.approx([3.0 if b else 1.0 for b in better])
    assert all(map(equal, judged[::2], learned)) and all(equal(found, before) for found in judged[1::2])
    assert not any(torch.equal(a[:2], b[:2]) for a, b in itertools.combinations(deals[:3], 2)), "other games"
    acted = [found for own, found, _ in played if own]
    practised = [found for own, found, _ in played if not own]
    assert all(map(equal, practised, [before, *learned])) and len(acted) == len(practised) == 4
    for now, new in zip([*acted[1:], weights(policy)], learned, strict=True):
        for name, p in now.items():
            for m in range(2):
                assert torch.equal(p[m], (new if better[m] else before)[name][m]), name
    assert any((learned[-1][name] != before[name]).any() for name in before)


def test_the_guard_counts_the_latest_rounds_most(small, monkeypatch):
    """By how many standard errors the new weights of two learners earn more, round by round"""
    margins, judged = [[1.3, 5.0], [1.3, -1.5], [1.3, -1.5], [1.3, -1.5]], []
    _, _, loop = adaptation(small)

    def play_games(*_, **__):
        number, old = divmod(len(judged), 2)
        judged.append(number)
        returns = torch.full((2, 4, 3), 9.0)
        for m, margin in enumerate(margins[number]):  # learner m sits in seat m; a standard error of 1
            returns[m, :, m] = (0 if old else margin) + 1.5**0.5 * torch.tensor([1.0, -1.0, 1.0, -1.0])
        return {"return": returns.double().numpy(), "steps": np.full(returns.shape, 16.0)}

    monkeypatch.setattr(adapt, "play_games", play_games)
    used = [metrics["policy changed"].tolist() for _, metrics in loop()]
    assert used == [[False, True], [False, False], [True, False], [True, False]]


@pytest.mark.parametrize("method", ["ppo-omg", "hop"])
def test_held_out_games_are_whole_and_real(method, tmp_path, monkeypatch):
    """And they begin with what is remembered as if the game that is on had ended"""
    hop = {"script": hopplus_mcts, "goal_dim": 2, "planner": "none"} if method == "hop" else {}
    args, state, loop = adaptation(untrained(tmp_path, method, **hop), repetitions=3, subgoal_updates=1)
    judged, play_games = [], adapt.play_games

    def watched(run, other, each, skip, play_on):
        rollouts, rollout = [], run.script.rollout
        begun = other.games.history.clone()
        watch(args, "rollout", rollouts)
        found = play_games(run, other, each, skip, play_on)
        run.script.rollout = rollout
        judged.append((begun, [result for _, result in rollouts]))
        return found

    monkeypatch.setattr(adapt, "play_games", watched)
    _, metrics = next(loop())
    for m in range(3):
        begun, results = judged[1 - int(metrics["policy changed"][m])]  # the new weights play first
        done, returns = (torch.cat([episodes[name] for *_, episodes in results]) for name in ("done", "return"))
        second = [done[:, 4 * m + e].nonzero().flatten()[1] for e in range(4)]
        mean = sum(float(returns[t, 4 * m + e, m]) for e, t in enumerate(second)) / 4
        assert float(metrics["held-out return"][m]) == pytest.approx(mean), "the second game of each place"
    assert all(outputs["log_probs"].isfinite().all() for _, outputs, _ in results)
    steps = sum(len(episodes["done"]) for _, played in judged for *_, episodes in played)
    assert len(judged) == 2 and metrics["test steps"].tolist() == [4 * steps + 8] * 3, "in 4 places; 8 in practice"
    now, before = state.games.history[:, :1].expand(-1, 4, -1, -1).chunk(2, 3)
    decay = hopplus_ppo.history_decay(state.args)
    kept = decay * (before + now)
    if method == "hop":  # its belief across games: how often each prey was taken
        kept = before
    torch.testing.assert_close(begun, torch.cat([0 * now, kept], 3))
    assert now.any() and begun.any() and decay > 0


@pytest.mark.parametrize("judged", ["held-out", "imagined", "own"])
def test_nothing_is_decided_by_what_is_no_number(judged, run, small, monkeypatch):
    mode, path = "frozen" if judged == "own" else "learning", run[0] if judged == "imagined" else small
    args, state, loop = adaptation(path, mode, subgoal_updates=0)
    script = args.run.script
    sentence = f"{judged} return is no number in 1 of 2 repetitions"
    if judged == "held-out":
        played = {"return": np.array([3 * [[1.0] * 3], 3 * [[math.nan] * 3]]), "steps": np.ones((2, 3, 3))}
        monkeypatch.setattr(adapt, "play_games", lambda *_, **__: played)
    elif judged == "imagined":
        imagine = script.imagine

        def broken(*given):
            samples = imagine(*given)
            samples["log_prob"][1, 2, 3] = math.nan
            return samples

        script.imagine, script.ppo_update = broken, lambda *_: {}
    else:
        rows = [p for name, p in state.networks.policy.params.items() if name.startswith("actor")]
        rows[0].data[1] = math.nan
        sentence = "checkpoint.pt: probabilities of learner 1 are no numbers in 100.0% of its decisions"
    with pytest.raises(FloatingPointError, match=sentence):
        list(loop())


def test_without_a_world_model_real_steps_are_learned_from(tmp_path):
    args, state, loop = adaptation(untrained(tmp_path, "ppo-omg"))
    seen, played = [], []
    watch(args, "ppo_update", seen)
    watch(args, "rollout", played)
    list(loop())
    own = [transitions for (_, games, *_), (transitions, *_) in played if games is state.games]
    first = [transitions.joint[:, :, :1] for transitions in own]  # of the two games at once
    assert torch.equal(state.games.replay.data.joint, torch.stack(first)), "MOA learns from what was seen"
    assert len(seen) == 4 and all((given[3]["real"] == 1).all() and given[3]["real"].shape[1] == 8 for given, _ in seen)


def test_a_learned_moa_is_used_where_it_predicted_better(tmp_path):
    better = [False, True]
    args, state, loop = adaptation(untrained(tmp_path, "ppo-omg"))
    moa, script, calls, learned = state.networks.moa, args.run.script, [], []
    before, inference = weights(moa), weights(state.networks.inference)
    losses = script.opponent_model_losses
    gain = torch.tensor([1.0 if b else -1.0 for b in better])

    def judged(*given, **more):
        if torch.is_grad_enabled():
            return losses(*given, **more)
        calls.append(weights(moa))
        return {"moa": torch.full((2,), 2.0) - (len(calls) % 2 == 0) * gain}  # first the old MOA, then the new

    train = script.train_opponent_models
    script.opponent_model_losses = judged
    script.train_opponent_models = lambda *given: (train(*given), learned.append(weights(moa)))[0]
    list(loop())
    assert len(calls) == 8 and len(learned) == 4
    assert all(equal(found, before) for found in calls[::2]), "the old one is always judged as it came"
    assert equal(calls[1], before) and all(equal(calls[2 * k + 1], learned[k - 1]) for k in (1, 2, 3)), (
        "learning goes on"
    )
    for name, p in moa.state_dict().items():
        for m in range(2):
            assert torch.equal(p[m], (learned[-1] if better[m] else before)[name][m]), name
    assert any((learned[-1][name] != before[name]).any() for name in before)
    assert equal(inference, weights(state.networks.inference)), "q_phi wrote the histories: it stays"


def test_a_learned_policy_is_used_where_it_earns_more_in_imagination(run):
    better = [False, True]
    args, state, loop = adaptation(run[0], subgoal_updates=0)
    policy, script, judged, learned, started = state.networks.policy, args.run.script, [], [], []
    before, imagine, update = weights(policy), script.imagine, script.ppo_update

    def imagined(*given):
        samples = imagine(*given)
        if policy_is_judged[0]:
            judged.append(weights(policy))
            new = len(judged) % 2 == 1
            # Two games in three of four rows, one in the other; what follows is cut, then it does not count.
            samples["ended"] = torch.zeros_like(samples["ended"])
            samples["ended"][:, 1, :3] = samples["ended"][:, [3, 5]] = True
            samples["mask"] = (torch.arange(6) < 5)[:, None].expand_as(samples["mask"])
            in_second_round = 1.0 if len(judged) > 2 else 2.2
            pay = torch.tensor([2.25 if b else in_second_round for b in better]) if new else torch.ones(2)
            samples["reward"] = pay[:, None, None] + torch.tensor([1.0, -1.0, 1.0, -1.0]).expand(2, 6, 4)
            samples["reward"][:, 4:] = 100.0
        policy_is_judged[0] = True
        return samples

    def updated(*given):
        policy_is_judged[0] = True
        started.append(weights(policy))
        found = update(*given)
        learned.append(weights(policy))
        return found

    policy_is_judged = [False]
    script.imagine, script.ppo_update = imagined, updated
    rounds = loop()
    for _ in range(2):
        policy_is_judged[0] = False  # the first imagined games of a round are for learning
        _, metrics = next(rounds)
        assert metrics["policy changed"].tolist() == better, "2.743 is less, 2.857 more than two standard errors"
    assert len(judged) == 4 and len(learned) == 2
    assert all(equal(found, before) for found in judged[1::2]) and all(map(equal, judged[::2], learned))
    assert all(map(equal, started, [before, *learned])), "learning goes on, used or not"
    for name, p in policy.state_dict().items():
        for m in range(2):
            assert torch.equal(p[m], (learned[-1] if better[m] else before)[name][m]), name
    assert metrics["imagined return"].tolist() == pytest.approx([16 / 7, 2.25 * 16 / 7]), "of a game that ended"


def test_imagined_games_begin_on_own_first_boards_with_what_is_remembered(run):
    args, state, loop = adaptation(run[0], repetitions=6)
    starts, rounds = [], loop()
    watch(args, "imagine", starts)
    _, metrics = next(rounds)
    (flags, _, _, start, rows, horizon), _ = starts[0]
    assert start.board.shape[:2] == (6, 1024) and (start.time == 0).all() and rows == 4 and horizon.tolist() == [6] * 6
    assert metrics["test steps"].tolist() == [0] * 6
    decay = hopplus_ppo.history_decay(flags)
    now, before = state.games.history[:, :1].expand(-1, 1024, -1, -1).chunk(2, 3)
    assert torch.equal(start.history, torch.cat([0 * now, decay * (before + now)], 3)), "as if the game had ended"
    assert decay > 0 and now.any() and before.any()
    kept = args.run.checkpoint["states"][0]["games"]["replay"]["data"]
    for m in range(6):
        own = kept["board"][:, m][kept["time"][:, m] == 0]
        for board in start.board[m].unique(dim=0):
            assert any(torch.equal(board, other) for other in own), "of the learner's own replay"


def test_the_horizon_is_measured_on_all_games_together(run):
    args, state, _ = adaptation(run[0], repetitions=6)
    for _ in range(200):  # until a game ends on the way, not only for a learner that has left
        transitions, _, _ = runs.play(args.run, state, 8)
        transitions = hopplus_ppo.Transitions(*(x[:, :, :1] for x in transitions))
        on_board = transitions.board[:, :6, 0, 0] < 12
        over = torch.cat([torch.zeros(6, 1, dtype=torch.bool), transitions.done[:, :5, 0]], 1)
        steps = (on_board & (over.cumsum(1) == 0)).int().cumprod(1).sum(1)
        if 2 <= steps.min() < 6 and (on_board.int().cumprod(1).sum(1) > steps).any():
            break
    predict, config = functools.partial(state.networks.world, method="predict"), state.args.config
    payoffs = list(config.payoffs())
    right, seen, lengths = [0] * 6, [0] * 6, [0] * 6
    for m in range(6):
        board, good = transitions.board[:, 0], True
        for k in range(6):
            if transitions.board[m, k, 0, 0] == 12:
                break
            board, reward = predict(board, transitions.walls[:, k].float(), transitions.joint[:, k])
            nearest = [
                min(payoffs, key=lambda p, x=float(x): abs(p - x)) for x in (reward[m, 0], transitions.reward[m, k, 0])
            ]
            good = good and torch.equal(board[m, 0], transitions.next_board[m, k, 0]) and nearest[0] == nearest[1]
            right[k] += good
            seen[k] += 1
            lengths[m] += 1
            if transitions.done[m, k, 0]:
                break
    shares = [r / s if s else 1.0 for r, s in zip(right, seen, strict=True)]
    for trust in (0.0, 0.05, 0.3, 0.6, 1.0):
        state.args.trust_exact_match = trust
        expected = next((k for k in range(6) if shares[k] < trust), 6)
        assert adapt.pooled_horizon(args.run, state, transitions).tolist() == [expected] * 6
    assert 0 < sum(right) < sum(seen)
    # Games that are over say nothing. The model knows all; but of the shortest nothing after the first step.
    known = torch.tensor([[float(k < games) for k in range(6)] for games in lengths])
    metrics = {f"wm/{kind}_match/{k + 1}": known[:, k] for kind in ("exact", "payoff") for k in range(6)}
    args.run.script.measure_horizon = lambda *_: (state.horizon, metrics)
    assert 2 <= min(lengths) < 6 and lengths == steps.tolist()
    state.args.trust_exact_match = 1.0
    assert adapt.pooled_horizon(args.run, state, transitions).tolist() == [6] * 6
    known[lengths.index(min(lengths)), 1:] = 0
    for trust, expected in ((1.0, 1), (0.9, 1), (0.5, 6)):
        state.args.trust_exact_match = trust
        assert adapt.pooled_horizon(args.run, state, transitions).tolist() == [expected] * 6


def test_nobody_searches_while_adapting(run, tmp_path):
    words = [*FAST, "--repetitions", 2, "--games-at-once", 2, "--seats", "learner,random,nearest_hare"]
    words += ["--no-references"]
    shutil.copy(run[0] / "checkpoint.pt", tmp_path)
    planner = ["--", "--planner", "mcts", "--num-simulations", 1, "--num-trees", 1]
    args = read(adapt, tmp_path / "checkpoint.pt", "--script", ROOT / "hopplus_mcts.py", *words, *planner)
    states = []
    watch(args, "make_train_state", states)
    found = adapt.main(args)
    assert list(found) == [f"{mode}/random + nearest_hare" for mode in ("frozen", "learning")]
    assert [state.args.planner for _, state in states] == ["none", "none"]


def test_the_probe_of_subgoals(run, tmp_path):
    """Subgoals that name the prey are read off, and those that do not are not; the labels are the prey of that game."""
    generator = torch.Generator().manual_seed(1)
    taken = torch.randint(3, (600,), generator=generator)
    noise = torch.randn(600, 4, generator=generator)
    for goals, least, most in ((torch.cat([noise, F.one_hot(taken, 3)], 1), 1.0, 1.0), (noise, 0.2, 0.45)):
        probe = subgoals.fit_probe(goals[::2], taken[::2])
        assert least <= (probe(goals[1::2]) == taken[1::2]).float().mean() <= most

    short = ["--", "--steps-after-first-hunt", "0"]  # so that there are more games than count
    args = subgoals.parse_args([str(run[0]), "--games", "8", "--device", "cpu", *short])
    state = runs.seat_learners(args.run, [["learner"] * 3], 1, [0, 1, 2], num_envs=8, imagination=False)
    state.games.env.reset(5)
    kept, play = [], runs.play
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subgoals, "play", lambda *given: kept.append(play(*given)) or kept[-1])
        goals, found, clock, place, seed = subgoals.collect(args.run, state)
    transitions, outputs, _ = kept[0]
    exited = hopplus_ppo.exited(CONFIG, transitions.board, transitions.next_board)
    assert transitions.done.sum(1).max() > 4
    expected = []
    for m, t, e, k in itertools.product(*(range(size) for size in (*transitions.done.shape, 2))):
        begin = next((u + 1 for u in range(t - 1, -1, -1) if transitions.done[m, u, e]), None)
        end = next((u for u in range(t, transitions.done.shape[1]) if transitions.done[m, u, e]), None)
        earlier = int(transitions.done[m, :t, e].sum())
        if begin is None or earlier > 3 or transitions.board[m, t, e, k + 1] == 12:
            continue
        caught = [int(transitions.joint[m, u, e, k + 1]) - 4 for u in range(begin, end + 1) if exited[m, u, e, k + 1]]
        expected.append((sum(caught), int(transitions.time[m, t, e]), e))
    assert sorted(expected) == sorted(zip(found.tolist(), clock.tolist(), place.tolist(), strict=True)) and expected
    assert set(seed.tolist()) == {args.run.args.seed}
    assert goals.shape == (len(expected), outputs["goals"].shape[3] // 2)
    noise, label = torch.randn(600, 150, generator=generator), torch.arange(600) % 3
    place = torch.randint(8, (600,), generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        one_seed = torch.ones(600, dtype=torch.int64)
        patch.setattr(subgoals, "collect", lambda *_: (noise, label, torch.zeros(600), place, one_seed))
        scores = subgoals.main(args)
    assert 0.2 < scores["probe_accuracy"] < 0.45, "what says nothing is not read off games that the probe was fitted to"
    folder = args.run.path.parent
    assert (folder / "subgoals_learner-learner-learner.png").stat().st_size > 5000
    rows = list(csv.reader((folder / "subgoals_learner-learner-learner.csv").open()))
    assert rows[0] == ["step", "accuracy", "samples"] and float(rows[1][1]) == pytest.approx(scores["probe_accuracy"])
    assert int(rows[1][2]) == (place % 2).sum()


def test_each_seed_has_a_probe_of_its_own(run, monkeypatch):
    """Subgoals that name the prey in one seed, and in the other name the next one"""
    generator = torch.Generator().manual_seed(1)
    taken = torch.randint(3, (600,), generator=generator)
    seed = torch.arange(600) // 300 + 11
    goals = F.one_hot((taken + (seed == 12)) % 3, 3) + 0.1 * torch.randn(600, 3, generator=generator)
    place = torch.arange(600) % 4
    args = subgoals.parse_args([str(run[0]), "--games", "8", "--device", "cpu"])
    monkeypatch.setattr(subgoals, "collect", lambda *_: (goals, taken, torch.zeros(600), place, seed))
    assert subgoals.main(args)["probe_accuracy"] == 1
    rows = list(csv.reader((args.run.path.parent / "subgoals_learner-learner-learner_seeds.csv").open()))
    assert rows[0] == ["seed", "probe", "majority", "samples"]
    assert [row[:2] for row in rows[1:]] == [["11", "1.0"], ["12", "1.0"]]
    for (_, _, majority, samples), number in zip(rows[1:], (11, 12), strict=True):
        tested = taken[(seed == number) & (place % 2 == 1)]
        assert int(samples) == 150 and float(majority) == tested.bincount().max() / 150


def test_scores_are_of_the_whole_last_quarter(folder, capsys):
    """Two of eight rounds, each game as much as any other; imagined returns of one round earlier"""
    words = ["--seats", "learner,random,random", "--repetitions", 3, "--modes", "learning", "--no-references"]
    args = read(adapt, folder, *FAST, *words, "--steps", 64, "--games-at-once", 4)
    games = np.array([2, 2, 2, 2, 2, 2, 6, 2])[:, None, None] * np.ones((8, 1, 3))  # [rounds, sets, repetitions]
    means = np.array([0, 0, 0, 4, 0, 9, 1, 5])[:, None, None] + np.arange(3)
    curves = {"learning": np.stack([games * means, games], 3)}
    dreams = {"learning": [np.full(3, x) for x in (9.0, 9, 9, 9, 9, 3, 4, 9)]}
    told = {"learning": {"policy changed": torch.ones(3), "test steps": torch.zeros(3)}}
    sets = adapt.co_player_sets(args)
    found = adapt.summarise(args, sets, curves, dreams, told, None)
    (row,) = table_of(folder / "adaptation_learner-random-random.csv")
    assert found == {"learning/random + random": pytest.approx((6 * 1 + 2 * 5) / 8 + 1)}
    assert float(row["learning mean"]) == pytest.approx(3) and float(row["learning imagined mean"]) == 3.5
    scores = [float(row["learning"]) for row in table_of(folder / "adaptation_learner-random-random_repetitions.csv")]
    assert scores == [2, 3, 4]
    said = capsys.readouterr().out
    assert "normalised" not in said and "nan" not in said, "there are no references"


def test_the_bayes_hunter_knows_nobody_at_the_start_of_a_game(folder, monkeypatch):
    args = read(adapt, folder, *FAST, "--seats", "learner,random,nearest_hare", "--games-at-once", 4)
    tables, _ = adapt.deal_seats(args, adapt.co_player_sets(args))
    update, begun, under_way = game.Seats.update, [], []

    def watched(seats, actions, present, done):
        update(seats, actions, present, done)
        begun.append(seats.posterior()[done])
        under_way.append(seats.posterior()[~done])

    monkeypatch.setattr(game.Seats, "update", watched)
    next(adapt.bayes_hunter(args, args.run, tables))
    begun, under_way = torch.cat(begun), torch.cat(under_way)
    assert len(begun) > 10 and (under_way - 1 / 3).abs().max() > 0.3
    torch.testing.assert_close(begun, torch.full_like(begun, 1 / 3))
