"""Frozen learners of other runs as co-players: `adapt.py --sets learned`"""

import csv
import dataclasses
from pathlib import Path

import hopplus_mcts
import hopplus_ppo
import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import adapt, evaluate, frozen_players, gru, runs
from stag_hunt_env import STAY, StagHuntConfig

import pytest
import torch
from matplotlib.figure import Figure
from test_evaluation import FAST, read, untrained, watch
from test_gru import untrained as untrained_gru

CONFIG = StagHuntConfig(height=3, width=4, num_hares=3, final_time=6)
SMALL = {"config": CONFIG, "num_seeds": 1}
SHORT = {"config": dataclasses.replace(CONFIG, final_time=3), "num_seeds": 1}


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: Path(path).write_text("a picture"))


def recurrent(folder, config=CONFIG):
    """A checkpoint of ppo_gru.py"""
    (path,) = untrained_gru(folder, config=config, seats="learner,mixed,mixed,mixed", num_seeds=1)
    return path


def table_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_sets():
    trio = {"3 of A": ("A",) * 3, "3 of B": ("B",) * 3}
    assert frozen_players.sets_of(["A"]) == {"3 of A": ("A",) * 3}
    mixed = {"2 of A + B": ("A", "A", "B"), "A + 2 of B": ("A", "B", "B")}
    assert frozen_players.sets_of(["A", "B"]) == {**trio, **mixed}
    assert list(frozen_players.sets_of(["A", "B", "C"])) == ["3 of A", "3 of B", "3 of C", "A + B + C"]
    four = frozen_players.sets_of(["A", "B", "C", "D"])
    assert list(four)[4:] == ["A + B + C", "B + C + D", "C + D + A", "D + A + B"]
    assert four["D + A + B"] == ("D", "A", "B")


def test_who_was_trained_on_another_game_is_refused(tmp_path):
    path = untrained(tmp_path / "one", **SMALL)
    other = untrained(tmp_path / "other", **SMALL | {"config": dataclasses.replace(CONFIG, num_hares=2)})
    with pytest.raises(game.UserError) as error:
        adapt.main(read(adapt, path, *FAST, "--sets", "learned", "--others", f"B={other}"))
    said = str(error.value)
    assert said == f"--others B={other}: it was trained on another game, with --num-hares 2 instead of 3"


@pytest.mark.parametrize("tf32", [True, False])
def test_another_run_does_not_change_how_the_gpu_multiplies(tf32, tmp_path):
    """Nor does a recurrent one, which always multiplies in tf32"""
    path = untrained(tmp_path, precision="fp32", **SMALL) if tf32 else recurrent(tmp_path)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    others = frozen_players.load_others((f"A={path}",), "cpu", CONFIG)
    tables = [["learner", "A", "A", "A"]]
    seats = game.Seats(game.StagHuntEnv(CONFIG, 2), frozen_players.stand_ins(others, tables))
    frozen_players.seat_others(others, seats, tables, [0, 0])
    after = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before
    assert after == tf32


@pytest.mark.parametrize("shared", [False, True])
def test_who_takes_a_seat(shared, tmp_path):
    """Whoever learned in it, else the first learner; the seeds by turns"""
    path = untrained(tmp_path, seats="random,learner,mixed,learner", share_parameters=shared, config=CONFIG)
    run = read(evaluate, path).run
    found = [[frozen_players.learner_at(run, seat, number) for seat in range(4)] for number in range(3)]
    assert found == ([[0] * 4, [1] * 4, [0] * 4] if shared else [[0, 0, 0, 1], [2, 2, 2, 3], [0, 0, 0, 1]])


def test_places(tmp_path):
    """Learner 0 sits in three places, 1 in one, 2 in none, 3 in two"""
    run = read(evaluate, untrained(tmp_path, **SMALL)).run
    tables = [["A", "A", "learner", "B"], ["A", "learner", "B", "A"], ["A", "B", "learner", "A"]]
    places = frozen_players.find_places(run, "A", tables, [0, 1, 2], "cpu")
    assert places.learners == [0, 1, 3]
    assert places.game.tolist() == [[0, 1, 2], [0, 0, 0], [1, 2, 1]]
    assert places.seat.tolist() == [[0, 0, 0], [1, 1, 1], [3, 3, 3]]
    assert places.filled.tolist() == [[name == "A" for name in table] for table in tables]
    assert places.row[places.filled].tolist() == [0, 3, 1, 6, 2, 7]


CASES = {
    "ppo": (hopplus_ppo, {}),
    "hopplus": (hopplus_ppo, {"share_parameters": True}),
    "hop": (hopplus_mcts, {"goal_dim": 2}),
    "hopplus-mcts": (hopplus_mcts, {"config": dataclasses.replace(CONFIG, max_wall_pieces=1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_they_play_as_they_do_where_they_learn(case, tmp_path):
    """Beside each learner a frozen copy watches from its seat: whatever happens, it would do the same"""
    script, changes = CASES[case]
    method = case if "subgoals" not in changes else "ppo-omg"
    path = untrained(tmp_path, method, script=script, **{**SMALL, **changes})
    words = [path, *FAST, "--sets", "learned", "--others", f"A={path}", "--repetitions", 4, "--games-at-once", 3]
    args = read(adapt, *words)
    run = args.run
    args.other_runs = adapt.load_other_runs(args)
    tables, index = adapt.deal_seats(args, adapt.co_player_sets(args))
    assert tables[1] == ["A", "learner", "A", "A"]
    state = adapt.make_state(args, run, tables, index, imagination=False)
    seats = state.games.seats
    by_game = [table for table in tables for _ in range(3)]
    watching = frozen_players.find_places(run, "learner", by_game, [0] * 12, "cpu")
    watcher = frozen_players.FrozenPlayers(run, state.games.env, watching)
    said = []
    watched = watcher.probs
    watcher.probs = lambda state: said.append(watched(state)) or said[-1]
    seats.groups.append(watcher)
    seats.filled.append(torch.zeros_like(watching.filled))
    transitions, outputs, episodes = runs.play(run, state, 20)
    own = [seats.to_learners(probs) for probs in said]
    torch.testing.assert_close(torch.stack(own, 1), outputs["log_probs"].exp())
    assert episodes["done"].sum(0).min() >= 3, "over several games"
    assert (transitions.joint != STAY).any()
    torch.testing.assert_close(watcher.history.flatten(0, 1), state.games.history.flatten(0, 1))
    if watcher.networks.inference is not None:
        assert watcher.history.any() and seats.groups[0].history.any()
    assert not watcher.args.imagination and getattr(watcher.args, "planner", "none") == "none"


def test_adaptation_to_them(tmp_path, monkeypatch):
    """Of A seed 1 stays for ever and seed 2 acts at random; B, which had one learner, stays for ever"""
    monkeypatch.setattr(adapt, "BEST_RESPONSE_GAMES", 8)
    path = untrained(tmp_path / "run", "ppo-omg", **SHORT)
    a = untrained(tmp_path / "a", stays=[True] * 4 + [False] * 4, config=SHORT["config"])
    b = untrained(tmp_path / "b", stays=[True], seats="learner,mixed,mixed,mixed", **SHORT)
    words = [*FAST, "--sets", "learned", "--others", f"A={a}", f"B={b}", "--repetitions", 4, "--games-at-once", 2]
    words += ["--steps", 12, "--every", 3]
    words += ["--modes", "learning", "--best-response-steps", 64]
    args = read(adapt, path, *words)
    played = []
    watch(args, "rollout", played)
    hunters, hunted = [], []
    action_probs, bayes_probs = frozen_players.LearnedSeats.action_probs, adapt.bayes_probs

    def watched(seats, *given):
        probs = action_probs(seats, *given)
        if any(seats is x for x in hunted):  # to the Bayes hunter they are strangers
            hunters.append((probs, seats.posterior()))
        return probs

    monkeypatch.setattr(frozen_players.LearnedSeats, "action_probs", watched)
    monkeypatch.setattr(adapt, "bayes_probs", lambda env, seats: (hunted.append(seats), bayes_probs(env, seats))[1])
    found = adapt.main(args)
    sets = ["3 of A", "3 of B", "2 of A + B", "A + 2 of B"]
    rows = ("random", "Bayes hunter", "learning", "best response")
    assert set(found) == {f"{name}/{key}" for name in rows for key in sets}
    expected = [["A"] * 3, ["B"] * 3, ["A", "A", "B"], ["A", "B", "B"]]

    moved = {}
    for _, (transitions, *_) in played:
        moves = (transitions.joint[..., 1:] != STAY).any(1)  # [M, E, K]
        kind = tuple(moves.shape[:2])
        moved[kind] = moved.get(kind, False) | moves
    assert moved.keys() == {(16, 2), (16, 1), (16, 4), (4, 8)}, "scored, practised, held out, best responses"
    for (blocks, places), moves in moved.items():
        names = [x for x in expected for _ in range(blocks // 4)]
        is_a = torch.tensor([[name == "A" for name in each] for each in names])
        number = torch.arange(blocks)[:, None] % 4 if blocks == 16 else torch.arange(places)
        second_seed = (number % 2 == 1).expand(blocks, places)
        assert torch.equal(moves, is_a[:, None] & second_seed[..., None]), "in a best response by turns too"
    probs, posterior = hunters[-1]
    others = torch.tensor([[seat != b // 2 % 4 for seat in range(4)] for b in range(32)])
    assert (probs[8:16][others[8:16]][:, STAY] == 1).all()
    assert any((later[8:16][others[8:16]] != 1 / 3).any() for _, later in hunters), "it guesses who they are"
    assert posterior.shape == (32, 4, 3)
    for end in (".csv", "_repetitions.csv", "_curve.csv", ".png"):
        assert (tmp_path / f"run/adaptation_learned{end}").stat().st_size > 0
    assert [row["co_players"] for row in table_of(tmp_path / "run/adaptation_learned.csv")] == sets
    assert all(found[f"{name}/3 of B"] <= 1 for name in ("learning", "best response")), "nobody hunts stags with it"


def test_a_recurrent_co_player_beside_another(tmp_path):
    """It acts as GruPlayers do, with a memory of each seat that goes on from game to game"""
    path = untrained(tmp_path / "a", stays=[True] * 4, **SMALL)
    texts = (f"A={path}", recurrent(tmp_path / "gru"))
    others = frozen_players.load_others(texts, "cpu", CONFIG)
    assert list(others) == ["A", "gru seed 3"]
    assert others["gru seed 3"].script is ppo_gru and others["A"].script is not ppo_gru
    tables = [
        ["learner", "A", "gru seed 3", "gru seed 3"],
        ["gru seed 3", "learner", "random", "A"],
        ["A", "random", "A", "learner"],
    ]
    env = game.StagHuntEnv(CONFIG, 6, "cpu", 1)
    seats = game.Seats(env, frozen_players.stand_ins(others, tables))
    seats = frozen_players.seat_others(others, seats, tables, [0] * 6)
    by_game = [table for table in tables for _ in range(2)]
    is_gru = torch.tensor([[name == "gru seed 3" for name in table] for table in by_game])
    is_a = torch.tensor([[name == "A" for name in table] for table in by_game])
    alone = gru.GruPlayers(others["gru seed 3"], env, is_gru)
    at_random = torch.full((3, 2, game.NUM_ACTIONS), 1 / game.NUM_ACTIONS)
    games = torch.zeros(6)
    for _ in range(30):
        expected = alone.probs(env.state)
        probs = seats.action_probs(env.state, at_random)
        assert torch.equal(probs[is_gru], expected[is_gru])
        assert (probs[is_a][:, STAY] > 0.99).all()
        torch.testing.assert_close(probs.sum(2), torch.ones(6, 4))
        actions = game.sample(probs)
        _, present_before, done = env.advance(actions)
        seats.update(actions, present_before, done)
        alone.update(actions, done)
        games += done
    _, group = seats.groups
    for ours, theirs in zip(group.memory, alone.memory, strict=True):
        assert torch.equal(ours, theirs)
    assert games.min() >= 3 and (group.memory.state.abs().amax(2) > 0.05).all()
    assert not group.memory.reset.any(), "it remembers"


@pytest.mark.parametrize("kind", ["gru", "ppo"])
def test_learners_adapt_to_recurrent_co_players(kind, tmp_path, monkeypatch):
    """A stays for ever, the recurrent G does not: where the learner is scored, practises and is tested"""
    config = SHORT["config"]
    a = untrained(tmp_path / "a", stays=[True] * 4, **SHORT)
    g = recurrent(tmp_path / "g", config)
    path = recurrent(tmp_path / "run", config) if kind == "gru" else untrained(tmp_path / "run", **SHORT)
    words = [*FAST, "--sets", "learned", "--others", f"A={a}", f"G={g}", "--repetitions", 4, "--games-at-once", 2]
    words += ["--steps", 12, "--every", 3, "--modes", "frozen", "learning", "--no-references"]
    moved = {}
    update = frozen_players.LearnedSeats.update

    def watched(seats, actions, *given):
        assert seats.num_learners == 16
        before = moved.get(seats.num_envs, torch.zeros_like(actions, dtype=torch.bool))
        moved[seats.num_envs] = before | (actions != STAY)
        update(seats, actions, *given)

    monkeypatch.setattr(frozen_players.LearnedSeats, "update", watched)
    scores = adapt.main(read(adapt, path, *words))
    sets = {"3 of A": "AAA", "3 of G": "GGG", "2 of A + G": "AAG", "A + 2 of G": "AGG"}
    assert set(scores) == {f"{mode}/{key}" for mode in ("frozen", "learning") for key in sets}
    assert [row["co_players"] for row in table_of(tmp_path / "run/adaptation_learned.csv")] == list(sets)
    assert moved.keys() == {2, 1, 4}, "scored, practised, held out"
    for places, moves in moved.items():
        is_a = []
        for others in sets.values():
            for repetition in range(4):
                table = "".join(("L" + others)[(seat - repetition) % 4] for seat in range(4))
                is_a += [[name == "A" for name in table]] * places
        assert torch.equal(moves, ~torch.tensor(is_a))
