"""evaluation/evaluate.py: frozen returns, MOA by kind of co-player, the world model's boards, the probe, a film."""

import itertools
import os
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import pretrain_world_model
import stag_hunt_env as game
from evaluation import evaluate, runs
from stag_hunt_env import HUNT_HARE, HUNT_STAG

import numpy as np
import pytest
import torch
from helpers import TINY_CONFIG as CONFIG
from helpers import untrained
from PIL import Image
from test_adapt import refusal
from torch.nn import functional as F

FILES = [".csv", ".gif", ".png"]


def load(folder, seats=None, **flags):
    args = evaluate.Args(run=str(folder), device="cpu", seats=seats, **flags)
    run = runs.load_run(args.run, None, "cpu")
    return args, run, runs.seats_of(run, seats)


def value(rows, measure, about, seed=1):
    (found,) = (row for row in rows if (row["measure"], row["about"], row["seed"]) == (measure, about, seed))
    return found["value"]


# ---- Games
def test_the_first_games_of_each_place_count(tmp_path, monkeypatch):
    """300 games a seed are two games in each of 150 places; whatever else ends there does not count"""
    folder = untrained(tmp_path, "ppo-omg", num_seeds=2)
    args, run, table = load(folder, "learner,nearest_hare,mixed", games=300)
    ends = [[] for _ in range(300)]
    advance = game.StagHuntEnv.advance

    def watched(env, actions):
        outcome = advance(env, actions)
        for place in outcome[2].nonzero().flatten().tolist():
            ends[place].append((env.final_return[place].tolist(), env.final_prey[place].tolist()))
        return outcome

    monkeypatch.setattr(game.StagHuntEnv, "advance", watched)
    with torch.no_grad():
        played = evaluate.play(args, run, table)
    rows = evaluate.game_rows(played, table, 1)
    assert min(map(len, ends)) == 2 < max(map(len, ends)), "games of different lengths"
    for seed, places in ((1, range(150)), (2, range(150, 300))):
        counted = [end for place in places for end in ends[place][:2]]
        for seat, name in enumerate(table):
            returns = [earned[seat] for earned, _ in counted]
            about = f"seat {seat} {name}"
            assert value(rows, "return", about, seed) == pytest.approx(np.mean(returns))
            hares = [prey[seat] == HUNT_HARE for _, prey in counted]
            assert value(rows, "hare", about, seed) == pytest.approx(np.mean(hares))
            stags = [prey[seat] == HUNT_STAG for _, prey in counted]
            assert value(rows, "stag", about, seed) == pytest.approx(np.mean(stags))
        assert value(rows, "return", "learners", seed) == value(rows, "return", "seat 0 learner", seed)
    (row,) = (row for row in rows if row["measure"] == "return" and row["about"] == "learners" and row["seed"] == 2)
    returns = [earned[0] for place in range(150, 300) for earned, _ in ends[place][:2]]
    assert row["count"] == 300
    assert row["half_width_95"] == pytest.approx(runs.interval(returns)[1])


def test_everybody_sits_where_it_learned(tmp_path):
    """Of the first seed only the learner of seat 2 ever moves, of the second nobody does"""
    folder = untrained(tmp_path, num_seeds=2, stays=[True, True, False, True, True, True])
    args, run, table = load(folder, games=200)
    rows = evaluate.game_rows(evaluate.play(args, run, table), table, 1)
    returns = {
        (seed, seat): value(rows, "return", f"seat {seat} learner", seed) for seed in (1, 2) for seat in range(3)
    }
    assert returns.pop((1, 2)) > 0.05
    assert set(returns.values()) == {0.0}


def test_the_film_shows_who_does_what(tmp_path, monkeypatch):
    shown = []
    render = game.render_rgb

    def watched(env, state, returns, names, hunting=None):
        shown.append((int(state.time[0]), names, hunting))
        return render(env, state, returns, names, hunting)

    monkeypatch.setattr(game, "render_rgb", watched)
    args, run, table = load(untrained(tmp_path), "learner,nearest_hare,waiting", games=5)
    frames = evaluate.play(args, run, table).frames
    assert len({frame.shape for frame in frames}) == 1
    assert all(names == table for _, names, _ in shown)
    times = [time for time, _, _ in shown]
    assert times.count(0) == sum(hunting is None for *_, hunting in shown) == 3, "three games, with their ends"
    assert any(hunting[1] == HUNT_HARE for _, _, hunting in shown if hunting is not None)


# ---- MOA
def test_the_figures_of_a_case_made_by_hand():
    about = {
        "moa": [(0.7, 0.2, 0.1), (0.5, 0.5), (0.4, 0.3, 0.2, 0.1), (0.1, 0.9)],
        "its own": [(1.0,), (0.0, 0.5, 0.5), (0.25, 0.25, 0.25, 0.25), (0.5, 0.5)],
        "Bayes": [(0.5, 0.5), (0.0, 1.0), (0.0, 0.0, 0.0, 0.5, 0.5), (0.0, 1.0)],  # surprised at last: 1e-9
    }
    for name, shares in about.items():  # of the first actions; the others have none
        about[name] = torch.tensor([[*share, *[0.0] * (7 - len(share))] for share in shares])
    about["action"] = torch.tensor([0, 1, 3, 0])
    found = evaluate.moa_figures(about)
    assert found["NLL"] == pytest.approx(-np.log([0.7, 0.5, 0.1, 0.1]).mean())
    assert found["NLL its own"] == pytest.approx(-np.log([1, 0.5, 0.25, 0.5]).mean())
    assert found["NLL Bayes"] == pytest.approx(-np.log([0.5, 1, 0.5, 1e-9]).mean())
    assert found["top-1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4), "a tie is shared"
    assert found["top-1 its own"] == pytest.approx((1 + 0.5 + 0.25 + 0.5) / 4)
    assert found["top-1 Bayes"] == pytest.approx((0.5 + 1 + 0.5 + 0) / 4)
    assert found["recall of up"] == 0.5
    assert found["recall of up its own"] == pytest.approx((1 + 0.5) / 2)
    assert (found["recall of down"], found["recall of right"]) == (0.5, 0)
    assert np.isnan(found["recall of stay"])


def test_a_kind_counts_its_own_steps_on_the_board_and_bayes_knows_its_past(tmp_path, monkeypatch):
    """Counted by hand, seat by seat, from what the game saw"""
    args, run, table = load(untrained(tmp_path, "ppo-omg"), "learner,mixed,learner", games=40)
    seen = []
    seated = evaluate.seat_all

    def watched(*given, **changes):
        state = seated(*given, **changes)
        env, seats = state.env, state.games.seats
        advance = env.advance

        def noted(actions):
            before = env.state.present.numpy().copy(), seats.kinds.clone(), seats.table.numpy().copy()
            outcome = advance(actions)
            seen.append((*before, actions.clone(), outcome[2].numpy().copy()))
            return outcome

        env.advance = noted
        return state

    monkeypatch.setattr(evaluate, "seat_all", watched)
    with torch.no_grad():
        played = evaluate.play(args, run, table)
    about, names = played.about, played.names
    expected = {}  # kind -> what was done
    bayes = []  # of the mixed seat, as the learners in seats 0 and 2 are asked
    over = np.zeros(40, bool)
    belief = np.full((40, 3), 1 / 3)
    for present, kinds, probs, actions, done in seen:
        predicted = np.einsum("bk,bka->ba", belief, probs[:, 1, :3])
        for place, seat in np.ndindex(40, 3):
            if present[place, seat] and not over[place]:
                kind = int(kinds[place, seat])
                observers = 1 if kind < 0 else 2  # the learners in other seats
                expected.setdefault(kind, []).extend([int(actions[place, seat])] * observers)
                bayes += [predicted[place]] * observers * (seat == 1)
        over |= done
        likelihood = np.stack([probs[place, 1, :3, actions[place, 1]] for place in range(40)]).clip(1e-9)
        belief = np.where(present[:, 1:2], belief * likelihood, belief)
        belief = belief / belief.sum(1, keepdims=True)
        belief[done] = 1 / 3
    assert over.all()
    for kind, actions in expected.items():
        part = about["action"][about["kind"] == kind]
        assert np.bincount(part, minlength=7).tolist() == np.bincount(actions, minlength=7).tolist(), kind
    learners = about["kind"] < 0
    assert torch.equal(about["its own"][learners], about["Bayes"][learners])
    found = about["Bayes"][~learners].numpy()
    order, wanted = np.lexsort(found.round(4).T), np.lexsort(np.array(bayes).round(4).T)
    assert np.abs(found[order] - np.array(bayes)[wanted]).max() < 1e-3
    hunters = about["kind"] == names.index("nearest_stag")
    assert about["its own"][hunters][:, HUNT_HARE].max() == 0 < about["moa"][hunters][:, HUNT_HARE].max()
    assert (about["moa"].sum(1) - 1).abs().max() < 1e-5


# ---- The world model
def test_boards_are_compared_within_a_game_and_until_the_learner_leaves(tmp_path, monkeypatch):
    """Against plain loops, with a world model that is wrong in every seventh row"""
    args, run, table = load(untrained(tmp_path, "hopplus"), "learner,mixed,learner")
    monkeypatch.setattr(evaluate, "STARTS", 5)
    ahead = CONFIG.final_time
    changes = {"num_steps": 5 + ahead, "imagination_horizon": ahead, "num_envs": 20}
    state = evaluate.seat_all(run, table, args, **changes)
    kept = []
    rollout = run.script.rollout
    monkeypatch.setattr(run.script, "rollout", lambda *given: kept.append(rollout(*given)) or kept[-1])
    asked = []

    def predict(board, joint):
        steps = kept[0][0]
        k = len(asked)
        places = [steps[name][:, start + k] for start in range(5) for name in ("next_board",)]
        right = torch.cat(places, 1).clone()
        assert torch.equal(joint, torch.cat([steps["joint"][:, start + k] for start in range(5)], 1))
        assert k == 0 or torch.equal(board, asked[-1].float()), "on its own boards"
        right[:, k::7, 0] += 1
        asked.append(right)
        payoff = torch.cat([steps["payoff"][:, start + k] for start in range(5)], 1).clone()
        payoff[:, k::5] += 0.5
        return right, payoff

    monkeypatch.setattr(state.networks["world"].network, "predict", predict)
    with torch.no_grad():
        found, counted = evaluate.exact_boards(run, state, state.games)
    steps = kept[0][0]
    learners, places = len(steps["done"]), 20
    exact, paid, stretches = np.zeros((3, learners, ahead))
    for m, start, place in np.ndindex(learners, 5, places):
        right = paid_right = True
        for k in range(ahead):
            row = start * places + place
            right &= not (row >= k and (row - k) % 7 == 0)
            paid_right &= not (row >= k and (row - k) % 5 == 0)
            ended = bool(steps["done"][m, start : start + k, place].any())
            left = int(steps["board"][m, start + k, place, 0]) == CONFIG.num_cells
            if not ended and not left:
                stretches[m, k] += 1
                exact[m, k] += right
                paid[m, k] += paid_right
    assert counted.tolist() == stretches.tolist()
    np.testing.assert_allclose(found, [exact, paid], atol=1e-3)
    assert 0 < stretches[:, ahead - 1].min() < stretches[:, 0].min()
    assert (exact < stretches).any() and (exact != paid).any()


def test_the_world_model_is_asked_with_rule_based_players_and_on_another_board(tmp_path, monkeypatch):
    """With weights that know the rules it would be right on any board; here only what is asked is looked at"""
    args, run, table = load(untrained(tmp_path, "hopplus", num_seeds=2), height=5, width=6)
    asked = []

    def exact_boards(run, state, games, rounds=1):
        asked.append((state, games))
        right = torch.tensor([2, 1, 0, 8, 0, 0])  # of three learners of two seeds
        counts = torch.tensor([2, 2, 0, 8, 0, 0])
        steps = 1 - torch.arange(CONFIG.final_time).clamp(max=1)  # none is longer than one step
        return torch.stack([right, right / 2])[..., None] * steps, counts[:, None] * steps

    monkeypatch.setattr(evaluate, "exact_boards", exact_boards)
    rows = evaluate.world_rows(args, run, table)
    (here, games), (watching, rule_based), (other, elsewhere) = asked
    assert games is here.games and not games.seats.watch
    assert rule_based is watching.watched and rule_based.seats.watch
    assert (other.args.config.height, other.args.config.width) == (5, 6) and elsewhere is other.watched
    for state in (watching, other):
        for name, p in run.networks["world"].items():
            assert torch.equal(state.networks["world"].params[name], p), name
    for about in ("these seats", "rule-based", "rule-based, 5x6"):
        assert value(rows, "exact after 1", about, 1) == 0.75
        assert value(rows, "exact after 1", about, 2) == 1
        assert value(rows, "payoff after 1", about, 2) == 0.5
        assert np.isnan(value(rows, "exact after 2", about, 1)), "there was none so long"


def test_a_pretrained_world_model_plays_games_that_it_never_saw(tmp_path, monkeypatch, capsys, no_pictures):
    """Each seed's model is asked about rule-based games on its board and on another one"""
    monkeypatch.setattr(evaluate, "STARTS", 4)
    flags = {"num_seeds": 2, "num_transitions": 300, "held_out_games": 4, "num_updates": 2, "wm_hidden": 16}
    flags |= {"config": CONFIG, "device": "cpu", "run_dir": str(tmp_path), "population": "nearest_hare"}
    pretrain_world_model.main(pretrain_world_model.Args(**flags))
    folder = min(tmp_path.glob("*__1__*"))
    weights = torch.load(folder / "checkpoint.pt")["networks"]["world"]
    asked = []
    exact_boards = evaluate.exact_boards

    def watched(run, state, games, rounds):
        assert set(games.seats.names) == {"nearest_hare"} and games.seats.watch
        for name, p in state.networks["world"].params.items():
            assert torch.equal(p, weights[name]), name
        asked.append((state.args.config.height, state.args.config.width))
        return exact_boards(run, state, games, 2)

    monkeypatch.setattr(evaluate, "exact_boards", watched)
    rows = evaluate.main(evaluate.Args(run=str(folder), device="cpu", width=5))
    assert asked == [(3, 4), (3, 5)]
    assert "rule-based, 3x5" in capsys.readouterr().out
    for about, seed in itertools.product(("rule-based", "rule-based, 3x5"), (1, 2)):
        assert 0 <= value(rows, "exact after 1", about, seed) < 1 >= value(rows, "payoff after 1", about, seed)
    assert (folder / "evaluation_world-model.csv").exists()


def test_what_is_no_run_is_refused_and_the_newest_one_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["evaluation/evaluate.py"])
    (tmp_path / "pixels").mkdir()
    hopplus_ppo.write_checkpoint(tmp_path / "pixels/checkpoint.pt", {"networks": {"pixel_world": {}}})
    for path, message in (
        ("runs/RUN", "no run in runs/"),
        ("pixels", "pixels/checkpoint.pt has no world model that reads boards, but pixel_world"),
    ):
        assert message in refusal(evaluate.main, evaluate.Args(run=path, device="cpu"))
    for number, name in enumerate(("b", "a")):
        os.utime(untrained(f"runs/{name}") / "checkpoint.pt", (number, number))
    for path in ("", "runs/RUN"):
        said = refusal(evaluate.main, evaluate.Args(run=path, device="cpu"))
        assert said.endswith("the newest run: python evaluation/evaluate.py runs/a")


# ---- The probe
def test_a_probe_reads_the_prey_from_subgoals_of_games_that_it_did_not_see():
    """In seed 1 the subgoal tells it, by another sign than in seed 2; in seed 3 it tells nothing"""
    random = torch.Generator().manual_seed(3)
    prey = torch.randint(3, (3000,), generator=random)
    seed = torch.arange(3000) % 3
    told = F.one_hot(prey, 3).float()
    goal = torch.where((seed == 0)[:, None], told, -told)
    goal = torch.where((seed == 2)[:, None], torch.randn(3000, 3, generator=random), goal)
    place = torch.arange(3000) // 3 % 10
    about = {"goal": goal, "prey": prey, "seed": seed, "place": place, "clock": torch.arange(3000) % 5.0}
    rows = evaluate.probe_rows(about, 1)
    assert value(rows, "probe", "all steps", 1) == value(rows, "probe", "all steps", 2) == 1
    assert abs(value(rows, "probe", "all steps", 3) - 1 / 3) < 0.08
    most = np.bincount(prey[(seed == 2) & (place % 2 == 1)]).max() / 500
    assert value(rows, "most frequent prey", "all steps", 3) == pytest.approx(most)
    assert value(rows, "probe", "step 4", 1) == 1


def test_the_prey_is_that_of_the_co_player_in_this_game(tmp_path):
    """A hare hunter ends with a hare or nothing; what a learner sees of it says so all along"""
    args, run, table = load(untrained(tmp_path, "ppo-omg"), "learner,nearest_hare,waiting", games=30)
    with torch.no_grad():
        played = evaluate.play(args, run, table)
    about = played.about
    hunter = about["kind"] == played.names.index("nearest_hare")
    took = about["prey"][hunter]
    assert set(took.tolist()) <= {0, 2} and (took == 2).float().mean() > 0.7
    assert set(about["prey"][~hunter].tolist()) == {0}, "who waits takes nothing"
    games = played.prey[:, 0, :, 1]  # [each, places]
    place = about["place"][hunter]
    assert all(int(prey) in games[:, int(x)].tolist() for prey, x in zip(took, place, strict=True))
    assert about["goal"].shape == (len(about["prey"]), run.args.goal_dim)


# ---- The command
EVERYTHING = {"return", "NLL", "exact after 1", "probe"}


@pytest.mark.parametrize(
    ("method", "script", "changes", "panels"),
    [
        ("ppo", hopplus_ppo, {}, {"return"}),
        ("hopplus", hopplus_ppo, {"subgoals": "none"}, EVERYTHING - {"probe"}),
        ("hopplus-mcts", hopplus_mcts, {"num_simulations": 2}, EVERYTHING),
    ],
)
def test_a_run_is_evaluated_with_all_models_that_it_has(method, script, changes, panels, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "STARTS", 4)
    if panels != EVERYTHING:  # pictures take most of the time
        monkeypatch.setattr(evaluate, "draw", lambda path, *_: path.touch())
        monkeypatch.setattr(evaluate.game, "write_gif", lambda path, _: Path(path).touch())
    folder = untrained(tmp_path / "run", method, script, num_seeds=2, **changes)
    rows = evaluate.main(evaluate.Args(run=str(folder), device="cpu", games=4))
    said = capsys.readouterr().out
    measures = {row["measure"] for row in rows}
    assert measures & EVERYTHING == panels
    for words, measure in {"MOA about": "NLL", "world model": "exact after 1", "probe of": "probe"}.items():
        assert (words in said) == (measure in panels)
    start = "evaluation_learner-learner-learner"
    assert sorted(path.name for path in folder.glob("evaluation*")) == [start + end for end in FILES]
    assert panels != EVERYTHING or Image.open(folder / f"{start}.gif").n_frames > 3
    assert all(f"wrote {folder / start}{end}" in said for end in FILES if panels == EVERYTHING)


@pytest.mark.parametrize("searches", [True, False])
def test_without_search_its_policy_acts(searches, tmp_path):
    folder = untrained(tmp_path, "hopplus-mcts", hopplus_mcts, num_simulations=2)
    args, run, table = load(folder, search=searches, games=2)
    plans = []
    plan_actions = run.script.plan_actions
    run.script.plan_actions = lambda *given: plans.append(1) or plan_actions(*given)
    with torch.no_grad():
        evaluate.play(args, run, table)
    assert bool(plans) == searches
