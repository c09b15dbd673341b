"""Frozen learners of other runs as co-players: `adapt.py --sets learned`"""

import dataclasses

import hopplus_mcts
from benchmarks.baselines import ppo_gru
from evaluation import adapt, frozen_players, runs
from stag_hunt_env import STAY, StagHuntConfig

import pytest
import torch
from helpers import untrained
from test_adapt import FAST, load, refusal
from test_adapt import few_games as few_games

CONFIG = StagHuntConfig(height=3, width=4, num_hares=3, final_time=6)
SMALL = {"config": CONFIG, "num_seeds": 1}


def recurrent(folder, **changes):
    """A run of ppo_gru.py that is not trained"""
    usual = {"config": CONFIG, "num_envs": 4, "num_steps": 8, "hidden": 8, "device": "cpu"}
    args = ppo_gru.Args(**usual | changes)
    state = ppo_gru.TrainState(args, 0, torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    ppo_gru.save_checkpoint(folder / "checkpoint.pt", state)
    return folder


def test_sets():
    assert frozen_players.sets_of(["A"]) == [["A"] * 3]
    trio = [["A"] * 3, ["B"] * 3]
    assert frozen_players.sets_of(["A", "B"]) == [*trio, ["A", "A", "B"], ["A", "B", "B"]]
    assert frozen_players.sets_of(["A", "B", "C"]) == [*trio, ["C"] * 3, ["A", "B", "C"]]
    four = [["A", "B", "C"], ["B", "C", "D"], ["C", "D", "A"], ["D", "A", "B"]]
    assert frozen_players.sets_of(["A", "B", "C", "D"])[4:] == four


def test_what_cannot_sit_there_is_named(tmp_path):
    other = dataclasses.replace(CONFIG, num_hares=2)
    untrained(tmp_path / "other", **SMALL | {"config": other})
    hop = untrained(tmp_path / "hop", "hop", hopplus_mcts, goal_dim=2, **SMALL)
    for text, sentence in (
        (f"B={tmp_path / 'other'}", "trained in another game, num_hares 2"),
        (f"waiting={tmp_path}", "it must be NAME=FOLDER, with a name of its own"),
        (str(tmp_path), "it must be NAME=FOLDER"),
        (f"B={hop}", "learners of --method hop cannot be co-players"),
    ):
        assert sentence in refusal(frozen_players.load_others, (text,), "cpu", CONFIG)


CASES = {
    "ppo": {},
    "ppo-omg": {},
    "hopplus": {"share_parameters": True},
    "hopplus-mcts": {"script": hopplus_mcts, "config": dataclasses.replace(CONFIG, max_wall_pieces=1)},
    "gru": {"model": "gru"},
    "liam": {"model": "liam"},
}


@pytest.mark.parametrize("case", CASES)
def test_they_play_as_they_do_where_they_learn(case, tmp_path):
    """Beside each learner a frozen copy watches from its seat: whatever happens, it would do the same"""
    changes = {"seats": "learner,mixed,mixed,mixed", **SMALL, **CASES[case]}
    is_recurrent = "model" in changes
    run = load(recurrent(tmp_path, model=case) if is_recurrent else untrained(tmp_path, case, **changes))
    tables = [["learner", *["random"] * 3], ["learner", "A", "random", "A"], ["A", "A", "nearest_hare", "learner"]]
    changes = {"num_envs": 3, "num_steps": 20, "planner": "none", "imagination": False}
    state = frozen_players.seat_beside(run, tables, [0, 0, 0], {"A": run}, **changes)
    seats = state.games.seats
    (group,) = seats.groups
    watcher = frozen_players.Group(run, state, "learner", tables)
    watcher.own = []
    own = watcher.probs

    def watched(now):
        watcher.own.append(seats.seats.to_learners(own(now)))
        return own(now)

    watcher.probs = watched
    seats.groups.append(watcher)
    steps, sums = run.script.rollout(state, state.games)
    agent_said = torch.stack(watcher.own, 1).gather(3, steps["action"].view(3, 20, 3, 1))[..., 0]
    torch.testing.assert_close(agent_said, steps["log_prob"].exp())
    assert sums["games/ended"][:, 0].min() >= 6, "over several games"
    memory = "state" if is_recurrent else "history"
    if getattr(state.games, memory).numel():
        theirs, ours = (getattr(x.games, memory) for x in (watcher.state, state))
        for table, seat in enumerate((0, 0, 3)):  # the learner's
            torch.testing.assert_close(theirs[seat, 3 * table : 3 * table + 3], ours[table])
        torch.testing.assert_close(getattr(group.state.games, memory), theirs[:, 3:])
        assert ours.any() and theirs.any()
    assert group.sits[::3, :, 0].tolist() == [[name == "A" for name in table] for table in tables[1:]]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_recurrent_co_player_remembers_games_as_in_training(keeps, tmp_path):
    run = load(recurrent(tmp_path, keep_state=keeps, state_reset_prob=1.0))
    tables = [["learner", "G", "G", "G"]]
    state = frozen_players.seat_beside(run, tables, [0], {"G": run}, num_envs=8, num_steps=1)
    (group,) = state.games.seats.groups
    for _ in range(20):
        run.script.rollout(state, state.games)
        ended = group.state.games.seats.per_learner(state.env.state.time == 0)
        assert torch.equal(group.state.games.reset, ended & (not keeps))
        reward = group.state.games.last_reward
    assert reward.shape == (4, 8)


def test_adaptation_to_them(tmp_path):
    """Of A seed 1 stays for ever and seed 2 acts at random; B, which had one learner, stays for ever"""
    folder = untrained(tmp_path / "run", "ppo-omg", **SMALL)
    untrained(tmp_path / "a", stays=[True] * 4 + [False] * 4, config=CONFIG, num_seeds=2)
    untrained(tmp_path / "b", stays=[True], seats="learner,mixed,mixed,mixed", **SMALL)
    recurrent(tmp_path / "g")
    others = tuple(f"{name}={tmp_path / name.lower()}" for name in "ABG")
    moved = {}
    own = frozen_players.LearnedSeats.update

    def watched(seats, done):
        moves = moved.setdefault(seats.num_blocks, torch.zeros_like(seats.actions, dtype=torch.bool))
        moves |= seats.actions != STAY
        own(seats, done)

    flags = {**FAST, "repetitions": 2, "modes": ("frozen",)}
    args = adapt.Args(**flags, run=str(folder), sets="learned", others=others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_players.LearnedSeats, "update", watched)
        rows = adapt.main(args)
    assert len(rows) == 4 * (3 * 2 + 1)
    assert {row["co_players"] for row in rows} == {"3 A", "3 B", "3 G", "A + B + G"}
    assert moved.keys() == {8, 4}, "played, best responses"
    for blocks, moves in moved.items():
        places = len(moves) // blocks
        for block in range(blocks):
            players = ("AAA", "BBB", "GGG", "ABG")[block * 4 // blocks]
            second_seed = block % 2 == 1
            expected = [name == "G" or (name == "A" and second_seed) for name in players]
            of_block = moves[block * places : (block + 1) * places].any(0)
            assert of_block[1:].tolist() == expected, block


@pytest.mark.parametrize("model", ["gru", "liam"])
def test_learners_of_ppo_gru_adapt_by_recurrent_ppo(model, tmp_path):
    """To others' learners: it goes on learning, from its first game, in as many sequences
    as there are minibatches; LIAM also to reconstruct them"""
    folder = recurrent(tmp_path / "g", num_seeds=2, model=model)
    untrained(tmp_path / "a", stays=[True] * 4, **SMALL)
    run = load(folder)
    assert run.num_learners == 2 and run.script.__name__ != "ppo_gru"
    flags = {**FAST, "run": str(folder), "repetitions": 4, "references": False}
    rows = adapt.main(adapt.Args(**flags, sets="learned", others=(f"A={tmp_path / 'a'}",)))
    found = {(row["co_players"], row["mode"], row["seed"]) for row in rows}
    assert found == {("3 A", mode, seed) for mode in ("frozen", "learning") for seed in (1, 2)}
    state = runs.seat_learners(run, [["learner", "waiting", "waiting", "waiting"]] * 2, [0, 1], num_steps=8, num_envs=3)
    assert state.args.state_reset_prob == 0
    learning = adapt.Adaptation(adapt.Args(), run, state, [0, 1])
    before = runs.copy_params(state.networks["policy"])
    steps, _ = run.script.rollout(state, state.games)
    batches = []
    update = run.script.ppo_update
    run.script.ppo_update = lambda *given: batches.append(given[1]) or update(*given)
    learning.learn({name: x[:, :, :1] for name, x in steps.items()})
    assert batches[0]["action"].shape == (2, 2, 4), "four sequences of two steps"
    for part in range(4):
        for name in ("action", "x", "co_actions", "co_views"):
            assert torch.equal(batches[0][name][:, :, part], steps[name][:, 2 * part : 2 * part + 2, 0])
        assert torch.equal(batches[0]["state"][:, part], steps["state"][:, 2 * part, 0])
    after = runs.copy_params(state.networks["policy"])
    learned = [name for name in before if name.startswith(("actor", "liam."))]
    assert all((after[name] != before[name]).flatten(1).any(1).all() for name in learned)
