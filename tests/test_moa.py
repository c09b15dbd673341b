"""evaluation/moa.py and world_model.py: how well MOA predicts, by kind of co-player, and the world model, by steps"""

import csv
import dataclasses
from pathlib import Path

import hopplus_ppo
import stag_hunt_env as game
from benchmarks.results import read_csv
from evaluation import evaluate, moa, runs, world_model
from stag_hunt_env import HUNT_HARE, HUNT_STAG, LEARNER, STAY, StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import write_checkpoint

CONFIG = StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    "config": CONFIG,
    "num_envs": 4,
    "num_steps": 8,
    "policy_hidden": 16,
    "subgoal_hidden": 8,
    "goal_dim": 5,
    "imagination_horizon": 5,
    "num_seeds": 2,
}


def checkpoint(folder: Path, method="ppo-omg", **changes) -> Path:
    """Of learners that are not trained"""
    args = hopplus_ppo.make_args(method, "cpu", **{**TINY, **changes})
    table = game.seats_table(args.seats, CONFIG.num_players)
    state = hopplus_ppo.make_train_state(args, [table] * 2, [1, 2], torch.device("cpu"))
    content = {"format": hopplus_ppo.FORMAT, "args": dataclasses.asdict(args), "states": [state.state_dict()]}
    content["script"] = {"name": "hopplus_ppo.py", "sha256": "of another version"}
    write_checkpoint(folder / "checkpoint.pt", content)
    return folder / "checkpoint.pt"


def rows_of(*shares):
    """Probabilities [n, 7] of the first actions, the others have none"""
    probs = torch.zeros(len(shares), 7)
    for row, share in enumerate(shares):
        probs[row, : len(share)] = torch.tensor(share)
    return probs


def test_the_numbers_of_a_case_made_by_hand():
    probs = rows_of((0.7, 0.2, 0.1), (0.5, 0.5), (0.4, 0.3, 0.2, 0.1), (0.1, 0.9))
    action = torch.tensor([0, 1, 3, 0])
    ceiling = rows_of((1.0,), (0.0, 0.5, 0.5), (0.25, 0.25, 0.25, 0.25), (0.5, 0.5))
    bayes = rows_of((0.5, 0.5), (0.0, 1.0), (0.0, 0.0, 0.0, 0.5, 0.5), (0.0, 1.0))  # surprised at last: 1e-9
    kind = torch.zeros(4, dtype=torch.int64)
    seed = torch.tensor([11, 11, 12, 12])
    predictions = moa.Predictions(probs, ceiling, bayes, action, kind, seed)
    found = moa.scores(predictions)
    assert found["NLL"] == pytest.approx(-np.log([0.7, 0.5, 0.1, 0.1]).mean())
    assert found["NLL ceiling"] == pytest.approx(-np.log([1, 0.5, 0.25, 0.5]).mean())
    assert found["NLL Bayes"] == pytest.approx(-np.log([0.5, 1, 0.5, 1e-9]).mean())
    assert found["top-1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4), "a tie is shared"
    assert found["top-1 ceiling"] == pytest.approx((1 + 0.5 + 0.25 + 0.5) / 4)
    assert found["top-1 Bayes"] == pytest.approx((0.5 + 1 + 0.5 + 0) / 4)
    table, recall, precision = moa.count_guesses(probs, action)
    assert table[0].tolist() == [1, 1, 0, 0, 0, 0, 0] and table[1].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [1, 0, 0, 0, 0, 0, 0] and table.sum() == 4
    assert recall[[0, 1, 3]].tolist() == [0.5, 0.5, 0] and np.isnan(recall[[2, 4, 5, 6]]).all()
    assert precision[:2] == pytest.approx([1 / 2.5, 0.5 / 1.5]) and np.isnan(precision[2:]).all()
    kind = moa.judge(predictions)
    assert kind.scores == found and kind.counts == {11: 2, 12: 2}
    assert kind.seed_scores[11]["NLL"] == pytest.approx(-np.log([0.7, 0.5]).mean())
    assert kind.seed_scores[12]["top-1 ceiling"] == pytest.approx((0.25 + 0.5) / 2)
    assert np.array_equal(kind.moa.confusion, table)
    assert kind.ceiling.recall[[0, 1, 3]] == pytest.approx([(1 + 0.5) / 2, 0.5, 0.25])
    rows = moa.score_rows({"random": kind})
    assert [row[:3] for row in rows[1:]] == [["random", "all", 4], ["random", 11, 2], ["random", 12, 2]]
    _, up, down, *_ = moa.action_rows({"random": kind})
    assert up[:4] == ["random", "up", 2, 0.5] and up[4] == pytest.approx(0.75), "beside the ceiling"
    assert up[5] == pytest.approx(1 / 2.5) and up[7:] == [1, 1, 0, 0, 0, 0, 0]
    assert down[6] == pytest.approx(0.5 / (0.5 + 0.25 + 0.5)), "of the guesses by its own probabilities"


def seated(folder, seats, **changes):
    run = evaluate.parse_args([str(checkpoint(folder, seats=seats, **changes)), "--device", "cpu"]).run
    table = seats.split(",")
    index = runs.learner_indices(run, table, 2)
    return run, runs.seat_learners(run, [table] * 2, 1, index, num_envs=20)


def test_a_kind_counts_only_its_own_steps_and_only_those_on_the_board(tmp_path, monkeypatch):
    """Counted by hand, seat by seat, from what the game saw"""
    run, state = seated(tmp_path, "learner,mixed,learner", redraw="game")
    env, seats, played = state.games.env, state.games.seats, []
    advance = env.advance

    def watched(actions):
        played.append((env.state.present.clone(), seats.kinds.clone(), actions.clone()))
        return advance(actions)

    monkeypatch.setattr(env, "advance", watched)
    parts = moa.by_kind(moa.predict(run, state, 14), seats.names)
    assert list(parts) == ["learner", "random", "nearest_stag", "nearest_hare"]
    gone = 0
    expected = {name: np.zeros(7) for name in parts}
    for present, kinds, actions in played:
        for place, seat in np.ndindex(40, 3):
            kind = int(kinds[place, seat])
            observers = 1 if kind < 0 else 2  # the learners in other seats
            gone += not present[place, seat]
            if present[place, seat]:
                expected["learner" if kind < 0 else seats.names[kind]][int(actions[place, seat])] += observers
    assert gone > 50, "steps that must not count"
    for name, part in parts.items():
        assert np.bincount(part.action, minlength=7).tolist() == expected[name].tolist(), name
        assert part.moa.sum(1).sub(1).abs().max() < 1e-5
    for name in ("nearest_stag", "nearest_hare"):
        other = HUNT_HARE if name == "nearest_stag" else HUNT_STAG
        assert expected[name][other] == 0 and parts[name].ceiling[:, other].max() == 0, "its own rule"
    assert torch.equal(parts["learner"].ceiling, parts["learner"].bayes)
    assert not torch.equal(parts["random"].ceiling, parts["random"].bayes)
    seeds = torch.cat([part.seed for part in parts.values()])
    second = [(present[20:], kinds[20:]) for present, kinds, _ in played]  # the places of seed 2
    observed = sum(int((present * torch.where(kinds < 0, 1, 2)).sum()) for present, kinds in second)
    assert int((seeds == 2).sum()) == observed and set(seeds.tolist()) == {1, 2}


MEASURED = (  # our names, the script's
    ("NLL", "nll"),
    ("NLL ceiling", "ceiling/nll"),
    ("top-1", "top1"),
    ("top-1 ceiling", "ceiling/top1"),
)


def test_what_is_said_is_the_script_s(tmp_path):
    """The same step as moa_metrics measures it"""
    run, state = seated(tmp_path, "learner,mixed,mixed", redraw="never")
    for _ in range(3):
        runs.play(run, state, 1)
    generator = torch.get_rng_state()
    saved = {name: x.clone() for name, x in state.games.env.state_dict().items()}
    kept = {name: x.clone() for name, x in state.games.seats.state_dict().items()}
    history, last_joint = state.games.history.clone(), state.games.last_joint.clone()
    part = moa.predict_step(run, state)
    torch.set_rng_state(generator)
    state.games.env.load_state_dict(saved)
    state.games.seats.load_state_dict(kept)
    state.games.history.copy_(history)
    state.games.last_joint.copy_(last_joint)
    env, seats = state.games.env, state.games.seats
    rules = [game.PLAYER_PROBS[name](env, env.state, game.ALL_SEATS) for name in seats.population]
    expected = (seats.posterior()[..., None] * torch.stack(rules, 2)).sum(2)  # [B, N, 7]
    transitions, _, episodes = runs.play(run, state, 1)
    there = transitions.board[:, 0, :, 1:3] < CONFIG.num_cells
    expected = torch.where((seats.kinds == LEARNER)[..., None], episodes["probs"][0], expected)
    torch.testing.assert_close(part.bayes, seats.to_learners(env.seats_to_ego(expected))[:, :, 1:][there])
    found = run.script.moa_metrics(state.args, state.games, state.networks, transitions, episodes)
    present = there.sum((1, 2))  # of each learner
    assert len(part.action) == int(present.sum())
    scores = moa.scores(part)
    for ours, theirs in MEASURED:
        mean = float((found[f"moa/{theirs}"] * present).sum() / present.sum())
        assert scores[ours] == pytest.approx(mean, abs=1e-5), ours


@pytest.mark.parametrize(("method", "changes", "has_moa", "has_world"), [
    ("ppo", {}, False, False),
    ("ppo-omg", {}, True, False),
    ("hopplus", {"subgoals": "none"}, True, True),
])  # fmt: skip
def test_evaluate_writes_it_for_runs_with_models(method, changes, has_moa, has_world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "film", lambda run, state, path: None)
    path = checkpoint(tmp_path, method, **changes)
    words = [str(path), "--games", "2", "--device", "cpu", "--seats", "learner,nearest_hare,waiting"]
    evaluate.main(evaluate.parse_args(words))
    said = capsys.readouterr().out
    start = f"{tmp_path}/evaluation_learner-nearest_hare-waiting"
    ends = {"_moa.csv": has_moa, "_moa_actions.csv": has_moa, "_moa.png": has_moa, "_world_model.csv": has_world}
    for end, wanted in ends.items():
        assert Path(start + end).exists() == wanted == (f"wrote {start}{end}" in said), end
    if not has_moa:
        return
    rows = read_csv(Path(f"{start}_moa.csv"))
    assert [(row["kind"], row["seed"]) for row in rows] == [
        (kind, seed) for kind in ("nearest_hare", "waiting") for seed in ("all", "1", "2")
    ]
    for of_all, *of_seeds in (rows[:3], rows[3:]):
        counts = [int(row["actions"]) for row in of_seeds]
        mean = np.average([float(row["NLL"]) for row in of_seeds], weights=counts)
        assert float(of_all["NLL"]) == pytest.approx(mean, rel=1e-5) and int(of_all["actions"]) == sum(counts)
    rows = read_csv(Path(f"{start}_moa_actions.csv"))
    assert [(row["kind"], row["action"]) for row in rows] == [
        (kind, action) for kind in ("nearest_hare", "waiting") for action in game.ACTION_NAMES
    ]
    hunts = {row["kind"]: int(row["times"]) for row in rows if row["action"] == "hunt hare"}
    stays = {row["kind"]: int(row["times"]) for row in rows if row["action"] == game.ACTION_NAMES[STAY]}
    assert hunts["nearest_hare"] > 0 == hunts["waiting"] and stays["waiting"] > 0
    assert Path(f"{start}_moa.png").stat().st_size > 5000


# ----------------------------------------------------------------------------------------
# evaluation/world_model.py


def test_boards_are_compared_within_a_game_and_until_the_learner_leaves(tmp_path, monkeypatch):
    """Against plain loops, with a world model that is wrong as often as by chance"""
    run, state = seated(tmp_path, "learner,mixed,learner", method="hopplus", redraw="game")
    kept = []
    monkeypatch.setattr(world_model, "play", lambda *words: kept.append(runs.play(*words)) or kept[-1])
    monkeypatch.setattr(world_model, "STARTS", 5)
    true_board = {}

    def predict_step(world, board, walls, joint):
        """Right, but in every seventh row"""
        step = len(true_board)
        transitions = kept[0][0]
        right = transitions.next_board[:, step : step + 5].flatten(1, 2).clone()
        right[:, step::7, 0] += 1
        true_board[step] = right
        assert torch.equal(joint, transitions.joint[:, step : step + 5].flatten(1, 2))
        assert step == 0 or torch.equal(board, true_board[step - 1]), "on its own boards"
        return right, None

    monkeypatch.setattr(run.script, "predict_step", predict_step)
    match = world_model.match_boards(run, state)
    transitions = kept[0][0]
    learners, ahead, places = len(transitions.done), 6, transitions.done.shape[2]
    exact = np.zeros((learners, ahead))
    stretches = np.zeros((learners, ahead))
    for m, t, e in np.ndindex(learners, 5, places):
        right = True
        for k in range(ahead):
            row = t * places + e
            right &= not (row >= k and (row - k) % 7 == 0)
            ended = bool(transitions.done[m, t : t + k, e].any())
            left = int(transitions.board[m, t + k, e, 0]) == CONFIG.num_cells
            if not ended and not left:
                stretches[m, k] += 1
                exact[m, k] += right
    assert match.stretches.tolist() == stretches.tolist() and match.exact.tolist() == exact.tolist()
    assert 0 < stretches[:, 5].min() < stretches[:, 0].min() and (exact < stretches).any()


def test_the_world_model_is_asked_in_these_seats_and_with_rule_based_players(tmp_path, monkeypatch, capsys):
    run, state = seated(tmp_path, "learner,nearest_hare,learner", method="hopplus")
    counts = torch.tensor([[8.0, 4.0], [8.0, 0.0], [8.0, 0.0], [8.0, 0.0]])  # four learners of two seeds
    exact = torch.tensor([[8.0, 1.0], [4.0, 0.0], [8.0, 0.0], [8.0, 0.0]])
    asked = []

    def match_boards(run, seated):
        asked.append(seated)
        return world_model.Match(exact, counts)

    monkeypatch.setattr(world_model, "match_boards", match_boards)
    world_model.report(run, state, ["learner", "nearest_hare", "learner"], 1, str(tmp_path / "x"))
    here, watched = asked
    assert here is state and not here.games.seats.watch and watched.games.seats.watch
    assert watched.networks is state.networks and LEARNER not in watched.games.seats.kinds
    said = capsys.readouterr().out
    assert "these seats: 1 0.8750 (32)" in said and "rule-based: 1 0.8750 (32)" in said
    rows = list(csv.DictReader((tmp_path / "x_world_model.csv").open()))
    assert [(row["games"], row["seed"], row["steps"]) for row in rows] == [
        (games, seed, steps) for games in ("these seats", "rule-based") for seed in "12" for steps in "12"
    ]
    assert [row["exact"] for row in rows[:4]] == ["0.75", "0.25", "1.0", "nan"]
    assert [row["stretches"] for row in rows[:4]] == ["16", "4", "16", "0"]
