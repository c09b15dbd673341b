"""evaluation/moa.py: how well MOA predicts, by kind of co-player"""

import csv
import dataclasses
import math
from pathlib import Path

import hopplus_ppo
import stag_hunt_env as game
from evaluation import evaluate, moa, runs
from stag_hunt_env import HUNT_HARE, HUNT_STAG, STAY, StagHuntConfig

import numpy as np
import pytest
import torch
from helpers import write_checkpoint
from matplotlib.figure import Figure

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
    found = moa.scores(moa.Predictions(probs, ceiling, bayes, action, kind))
    assert found["NLL"] == pytest.approx(-np.log([0.7, 0.5, 0.1, 0.1]).mean())
    assert found["ceiling"] == pytest.approx(-np.log([1, 0.5, 0.25, 0.5]).mean())
    assert found["Bayes"] == pytest.approx(-np.log([0.5, 1, 0.5, 1e-9]).mean())
    assert found["top-1"] == pytest.approx((1 + 0.5 + 0 + 0) / 4), "a tie is shared"
    assert found["top-3"] == pytest.approx(3 / 4)
    # Each in a bin of its own (of 15): 10, 7, 6, 13.
    assert found["ECE"] == pytest.approx((0.3 + 0 + 0.4 + 0.9) / 4)
    table = moa.confusion(probs, action)
    assert table[0].tolist() == [1, 1, 0, 0, 0, 0, 0] and table[1].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]
    assert table[3].tolist() == [1, 0, 0, 0, 0, 0, 0] and table.sum() == 4
    recall, precision = moa.recall_and_precision(table)
    assert recall[[0, 1, 3]].tolist() == [0.5, 0.5, 0] and np.isnan(recall[[2, 4, 5, 6]]).all()
    assert precision[:2] == pytest.approx([1 / 2.5, 0.5 / 1.5]) and np.isnan(precision[2:]).all()


def test_confidences_of_one_bin_are_compared_together():
    probs = rows_of((0.95, 0.05), (0.97, 0.03), (0.96, 0.04), (0.99, 0.01))
    action = torch.tensor([0, 0, 1, 0])
    confidence = (0.95 + 0.97 + 0.96 + 0.99) / 4
    assert moa.calibration_error(probs, action) == pytest.approx(abs(confidence - 3 / 4), rel=1e-4)
    assert moa.calibration_error(rows_of((1.0,)), torch.tensor([0])) == 0


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
    transitions, _, episodes = runs.play(run, state, 1)
    found = run.script.moa_metrics(state.args, state.games, state.networks, transitions, episodes)
    present = (transitions.board[:, 0, :, 1:3] < CONFIG.num_cells).sum((1, 2))  # of each learner
    assert len(part.action) == int(present.sum())
    scores = moa.scores(part)
    for ours, theirs in (("NLL", "nll"), ("ceiling", "ceiling/nll"), ("Bayes", "bayes/nll"), ("top-1", "top1")):
        mean = float((found[f"moa/{theirs}"] * present).sum() / present.sum())
        assert scores[ours] == pytest.approx(mean, abs=1e-5), ours


@pytest.mark.parametrize(("method", "changes", "has_moa"), [
    ("ppo", {}, False),
    ("ppo-omg", {}, True),
    ("hopplus", {"subgoals": "none"}, True),
])  # fmt: skip
def test_evaluate_writes_it_for_runs_with_a_moa(method, changes, has_moa, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "film", lambda run, state, path: None)
    path = checkpoint(tmp_path, method, **changes)
    words = [str(path), "--games", "2", "--device", "cpu", "--seats", "learner,nearest_hare,waiting"]
    evaluate.main(evaluate.parse_args(words))
    said = capsys.readouterr().out
    title = tmp_path / "evaluation_learner-nearest_hare-waiting_moa"
    assert title.with_suffix(".csv").exists() == title.with_suffix(".png").exists() == has_moa
    assert ("MOA about nearest_hare" in said) == ("MOA about waiting" in said) == has_moa
    if has_moa:
        rows = list(csv.DictReader(title.with_suffix(".csv").open()))
        assert [(row["kind"], row["action"]) for row in rows] == [
            (kind, action) for kind in ("nearest_hare", "waiting") for action in game.ACTION_NAMES
        ]
        hunts = {row["kind"]: int(row["times"]) for row in rows if row["action"] == "hunt hare"}
        stays = {row["kind"]: int(row["times"]) for row in rows if row["action"] == game.ACTION_NAMES[STAY]}
        assert hunts["nearest_hare"] > 0 == hunts["waiting"] and stays["waiting"] > 0
        assert title.with_suffix(".png").stat().st_size > 5000
        for row in rows:
            done = int(row["times"]) > 0
            assert math.isnan(float(row["recall"])) != done and (not done or 0 <= float(row["recall"]) <= 1)


def test_the_picture_can_be_read(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(moa, "Figure", lambda *words, **named: drawn.append(Figure(*words, **named)) or drawn[-1])
    table = np.eye(7) * 3
    table[0, 1] = 1
    moa.draw_confusion(tmp_path / "picture.png", {"random": table, "learner": table})
    left, right = drawn[0].axes
    assert (left.get_title(), right.get_title()) == ("co-player: random", "co-player: learner")
    assert left.get_ylabel() == "what the co-player did" and "MOA's likeliest action" in left.get_xlabel()
    digits = {tuple(text.get_position()): text for text in left.texts}
    assert digits[0, 0].get_text() == "75%" and digits[1, 0].get_text() == "25%" and len(digits) == 8
    assert min(text.get_fontsize() for text in left.texts) >= 9
