"""Players whom nobody trained with, in both scripts that learn; and learners of one seed among those of another."""

import csv
import dataclasses
import itertools
import math
import re

import helpers
import numpy as np
import pytest
import torch
from helpers import seeded

import hopplus_mcts
import hopplus_ppo
from stag_hunt_env import PLAYER_PROBS, STAY, STRANGER_PROBS, StagHuntEnv, StagHuntFlags, copy_state, sample

CPU = torch.device("cpu")
TINY = {**helpers.TINY, "num_goals": 5, "method": "ppo"}
FOUR = StagHuntFlags(height=3, width=4, num_hares=3, final_time=6)
WALLS = StagHuntFlags(height=4, width=6, num_players=3, num_stags=2, num_hares=3, final_time=7, max_wall_pieces=2)
both_scripts = pytest.mark.parametrize("hop", [hopplus_ppo, hopplus_mcts], ids=["ppo", "mcts"])
pytestmark = pytest.mark.usefixtures("one_thread")


def experiment(hop, **changes):
    args = hop.resolved(hop.Args(**{**TINY, **changes}))
    kinds = [hop.seat_kinds(args.seats.split(","))] * args.num_seeds
    seating = hop.make_seating(kinds, args.num_envs, args.share_parameters, CPU)
    return hop.make_experiment(args, seating, list(range(args.seed, args.seed + args.num_seeds)), CPU)


def play(hop, x, num_steps):
    return hop.rollout(x.args, x.env, x.seating, x.nets, x.carry, x.generator, num_steps)


def steps_of_games(hop, x, steps):
    """step by step: state, kinds and belief before; Steps and Choices; who ended"""
    for _ in range(steps):
        before = copy_state(x.env.state), x.carry["kinds"].clone(), x.carry["belief"].clone()
        w, c, _ = play(hop, x, 1)
        yield *before, w, c, w.done[0, 0]


SWITCHED = [(hopplus_ppo, helpers.TINY_CONFIG), (hopplus_mcts, helpers.TINY_CONFIG), (hopplus_ppo, WALLS)]


@pytest.mark.parametrize(("hop", "config"), SWITCHED, ids=["ppo", "mcts", "walls"])
def test_who_switches_hunts_stag_in_one_game_and_hare_in_the_next(hop, config):
    x = experiment(hop, method="ppo-omg", seats="learner,switching,noisy_hare", num_envs=24, config=config)
    names, phases, games = list(PLAYER_PROBS), ([], []), torch.zeros(24, dtype=torch.int64)
    first = x.carry["kinds"][:, 1].clone()
    for state, kinds, belief, w, c, done in steps_of_games(hop, x, 30):
        flipped = {1: 2, 2: 1}
        expected = [flipped[k] if g % 2 else k for k, g in zip(first.tolist(), games.tolist(), strict=True)]
        assert kinds[:, 1].tolist() == expected
        assert (kinds[:, 0] == hop.LEARNER).all() and (kinds[:, 2] == 4).all()
        table = torch.stack([probs(x.env, state, 1) for probs in PLAYER_PROBS.values()], 1)  # [B, kinds, 7]
        truth, guess = c.truth[0, 0], c.bayes[0, 0]  # [B, K, 7]
        for b, k in enumerate(expected):
            assert torch.equal(truth[b, 0], table[b, k]), names[k]
            assert truth[b, 0, int(w.joint[0, 0, b, 1])] > 0
            phases[k - 1].append(int(w.joint[0, 0, b, 1]))
        assert torch.equal(truth[:, 1], STRANGER_PROBS["noisy_hare"](x.env, state, 2))
        for seat in (1, 2):  # of strangers too the guess is a mixture of the players it knows
            known = torch.stack([probs(x.env, state, seat) for probs in PLAYER_PROBS.values()], 1)
            mixture = (belief[:, seat].softmax(1)[..., None] * known).sum(1)
            torch.testing.assert_close(guess[:, seat - 1], mixture, atol=1e-6, rtol=0)
        games += done
    assert games.min() >= 3 and {1, 2} == set(first.tolist())
    assert 5 in phases[0] and 6 in phases[1]


@both_scripts
def test_first_games_are_drawn_for_each_place_and_seat(hop):
    kinds = experiment(hop, seats="switching,learner,switching", num_envs=400, seed=3).carry["kinds"]
    counts = [int(((kinds[:, 0] == a) & (kinds[:, 2] == b)).sum()) for a in (1, 2) for b in (1, 2)]
    assert sum(counts) == 400 and helpers.chi_square_p(counts) > 1e-3


@both_scripts
def test_strangers_are_neither_drawn_nor_watched_in_pretraining(hop, monkeypatch):
    x = experiment(hop, seats="learner,mixed,waiting", num_envs=64)
    drawn = torch.cat([kinds[:, 1] for _, kinds, *_ in steps_of_games(hop, x, 20)])
    assert set(drawn.tolist()) == {0, 1, 2} and (x.carry["kinds"][:, 2] == 5).all()
    rollout, seen = hop.rollout, []

    def watched(args, env, seating, nets, carry, *rest, **more):
        found = rollout(args, env, seating, nets, carry, *rest, **more)
        seen.append(carry["kinds"].clone())
        return found

    for name in STRANGER_PROBS:
        monkeypatch.setitem(STRANGER_PROBS, name, None)  # whoever asks fails
    monkeypatch.setattr(hop, "rollout", watched)
    args = hop.resolved(hop.Args(**{**TINY, "method": "ppo-omg", "seats": "learner,switching,noisy_stag"}))
    hop.pretrain(args, [1, 2], CPU)
    assert len(seen) >= 4 and all(set(kinds.flatten().tolist()) <= {0, 1, 2} for kinds in seen)


@both_scripts
def test_without_strangers_nothing_is_drawn_for_them(hop, monkeypatch):
    for name in STRANGER_PROBS:
        monkeypatch.setitem(STRANGER_PROBS, name, None)  # whoever asks fails
    x = experiment(hop, num_envs=8, seats="learner,mixed,nearest_hare")
    generator, other = seeded(5), seeded(5)
    hop.new_carry(x.args, x.env, x.seating, generator)
    torch.randint(len(PLAYER_PROBS), (8, 3), generator=other)
    assert torch.equal(generator.get_state(), other.get_state()), "runs without strangers keep their random numbers"
    play(hop, x, 20)


@both_scripts
def test_the_oracle_does_not_know_strangers(hop):
    x = experiment(hop, method="ppo-omg", subgoals="oracle", seats="learner,waiting,switching")
    for _, kinds, _, w, _, _ in steps_of_games(hop, x, 14):
        assert w.told.shape[-1] == 5 and (w.told[0, 0, :, 0] == 0).all()
        assert torch.equal(w.told[0, 0, :, 1].argmax(1), kinds[:, 2] - hop.MIXED) and (w.told[0, 0, :, 1].sum(1) == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Meeting them


def saved_run(folder, hop=hopplus_ppo, actors=None, **changes):
    """A checkpoint of untrained learners. actors: whether learner m always stays (else it acts at random)"""
    x = experiment(hop, **changes)
    if actors is not None:
        with torch.no_grad():
            x.nets.policy.actor[-1].weight.zero_()
            x.nets.policy.actor[-1].bias.zero_()
            x.nets.policy.actor[-1].bias[:, 0, STAY] = 100.0 * torch.tensor(actors)
    form = "hopplus-5" if hop is hopplus_ppo else "hopplus-mcts-4"
    folder.mkdir(exist_ok=True)
    content = {"format": form, "args": dataclasses.asdict(x.args), "tensors": x.tensors()}
    hop.save_atomically(folder / "checkpoint.pt", content)
    return str(folder / "checkpoint.pt")


ADAPT = {"adapt_steps": 32, "adapt_every": 8, "adapt_repetitions": 8, "adapt_games": 4, "adapt_rounds": 1}


@both_scripts
def test_the_sets_of_strangers(hop, tmp_path, monkeypatch):
    make_seating, seats = hop.make_seating, []
    monkeypatch.setattr(hop, "make_seating", lambda kinds, *rest: (seats.append(kinds), make_seating(kinds, *rest))[1])
    path = saved_run(tmp_path, hop, config=FOUR, seats="learner,learner,learner,learner")
    seats.clear()
    references = hop is hopplus_ppo
    monkeypatch.setitem(hop.METHODS, "ppo", {**hop.METHODS["ppo"], "num_envs": 16})  # best responses have 512 games each
    flags = {**ADAPT, "total_steps": 512, "adapt_sets": "strangers", "adapt_references": references, "device": "cpu"}
    found = hop.main(hop.Args(adapt=path, **flags, **({} if references else {"planner": "none"})))
    rows = list(csv.DictReader((tmp_path / "adaptation.csv").open()))
    sets = {
        "3 noisy NS": ["noisy_stag"] * 3,
        "3 noisy NH": ["noisy_hare"] * 3,
        "3 switching": ["switching"] * 3,
        "3 waiting": ["waiting"] * 3,
        "noisy NS + 2 noisy NH": ["noisy_stag", "noisy_hare", "noisy_hare"],
        "switching + waiting + random": ["switching", "waiting", "random"],
    }
    assert [row["co_players"] for row in rows] == list(sets) and (tmp_path / "adaptation.png").exists()
    modes = ["random", "frozen", "learning", "best response"] if references else ["frozen", "learning"]
    assert {key.split("/")[0] for key in found} == set(modes) and len(found) == 6 * len(modes)
    for number, players in enumerate(sets.values()):
        expected = hop.seat_kinds(["learner", *players])
        for r in range(8):
            assert [seats[0][8 * number + r][(r + k) % 4] for k in range(4)] == expected
    assert all(0 <= found[f"{mode}/{key}"] <= 5 for mode in modes for key in sets)
    assert all(found[f"{mode}/3 waiting"] <= 1 for mode in modes), "who waits does not help with the stag"
    if references:
        assert seats[1] == [hop.seat_kinds(["learner", *players]) for players in sets.values()]
        assert all(float(row["best response mean"]) == found[f"best response/{row['co_players']}"] for row in rows)


def test_a_best_response_is_measured_over_whole_games(monkeypatch):
    """Games with players who wait last to the end, all at the same time: none ends within the last of 12 iterations."""
    monkeypatch.setitem(hopplus_ppo.METHODS, "ppo", {**hopplus_ppo.METHODS["ppo"], "num_envs": 4, "policy_hidden": 8})
    source = hopplus_ppo.resolved(
        hopplus_ppo.Args(**{**TINY, "config": dataclasses.replace(helpers.TINY_CONFIG, final_time=35)})
    )
    args = dataclasses.replace(source, total_steps=12 * 32 * 4)
    (found,) = hopplus_ppo.best_responses(args, source, {"2 waiting": ("waiting", "waiting")}, CPU)
    assert 0 < found <= 1


@both_scripts
def test_strangers_in_an_evaluation(hop, tmp_path, monkeypatch):
    monkeypatch.setattr(hop, "film", lambda *_: None)
    path = saved_run(tmp_path, hop)
    flags = {"evaluate": path, "eval_games": 64, "device": "cpu"}
    found = hop.main(hop.Args(**flags, seats="learner,waiting,noisy_hare"))
    assert found["return/player_1"] == 0 and found["return/player_2"] > 0.6
    assert hop.main(hop.Args(**flags, seats="learner,waiting,waiting"))["return/player_0"] <= 1


REFUSED = [  # flags, what the error must say
    ({"adapt": "{one}", "adapt_sets": "strangers"}, "have 3 co-players, this game has 2: use --seats"),
    ({"adapt": "{one}", "adapt_sets": "strangers", "seats": "learner,waiting,waiting"}, "--seats and --adapt-sets strangers"),
    ({"adapt": "{one}", "seats": "learner,waiting,wolf"}, "'wolf'; the known ones are .*noisy_stag.*switching"),
    ({"cross_play": "{one}"}, "at least 2 seeds, .* has 1: train with --num-seeds"),
    ({"cross_play": "{mixed}"}, "learners in all seats, not learner,mixed,learner"),
    ({"cross_play": "{two}", "evaluate": "{two}"}, "--cross-play.* exclude each other"),
    ({"cross_play": "missing.pt"}, "there is no checkpoint missing.pt"),
]


@both_scripts
def test_refused(hop, tmp_path):
    paths = {"one": {}, "two": {"num_seeds": 2}, "mixed": {"num_seeds": 2, "seats": "learner,mixed,learner"}}
    paths = {name: saved_run(tmp_path / name, hop, **flags) for name, flags in paths.items()}
    before = sorted(tmp_path.rglob("*"))
    for flags, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            hop.main(hop.Args(device="cpu", **{key: value.format_map(paths) for key, value in flags.items()}))
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------------------------------------------------------------
# Cross-play


def cross_play(hop, path, **flags):
    """the table [S, S] that it writes, and the seeds' names"""
    found = hop.main(hop.Args(cross_play=path, device="cpu", **flags))
    with open(path.replace("checkpoint.pt", "cross_play.csv"), newline="") as file:
        header, *rows = csv.reader(file)
    names = [row[0] for row in rows]
    assert header == ["learner of seed", *(f"among seed {name}" for name in names)]
    matrix = np.array([[float(value) for value in row[1:]] for row in rows])
    assert found["own team"] == pytest.approx(matrix.diagonal().mean())
    off = [matrix[a, b] for a, b in itertools.permutations(range(len(names)), 2)]
    assert set(found) == {"own team", "other teams"} and found["other teams"] == pytest.approx(np.mean(off))
    return matrix, names


def alone_among_stayers(seat, games=4000):
    """mean return, and its standard error, of one who acts at random while the others stay"""
    env, generator = StagHuntEnv(helpers.TINY_CONFIG.checked(), games, seed=9), seeded(9)
    state, total = env.initial_state(), torch.zeros(games)
    for _ in range(env.config.final_time):
        actions = torch.full((games, 3), STAY)
        actions[:, seat] = sample(PLAYER_PROBS["random"](env, state, seat), generator)
        state, reward, *_ = env.transition(state, actions)
        total += reward[:, seat]
    return float(total.mean()), float(total.std()) / math.sqrt(games)


def test_the_row_is_who_plays_and_the_column_is_among_whom(tmp_path, capsys):
    """Only learner 2 of seed 5 ever moves: it scores among anybody, and nobody else does."""
    path = saved_run(tmp_path, num_seeds=3, seed=5, actors=[True, True, False] + [True] * 6)
    matrix, names = cross_play(hopplus_ppo, path, eval_games=1152)
    expected, error = alone_among_stayers(2)
    assert names == ["5", "6", "7"] and expected > 0.15
    assert (matrix[1:] == 0).all(), "its team's returns are not its partner's"
    assert np.abs(matrix[0] - expected / 3).max() < 5 * error * math.sqrt(4000 / 384) / 3  # it sits in one seat of three
    printed = capsys.readouterr().out
    assert "1152 games per pair" in printed and re.search(rf"^ +5 +{matrix[0, 0]:.3f} +{matrix[0, 1]:.3f}", printed, re.M)
    assert (tmp_path / "cross_play.png").stat().st_size > 1000


@pytest.mark.parametrize("share", [False, True])
def test_everybody_keeps_the_seat_in_which_it_learned(share, tmp_path, monkeypatch):
    transplant, seen = hopplus_ppo.transplant, []
    monkeypatch.setattr(hopplus_ppo, "transplant", lambda x, saved, index: (seen.append(index), transplant(x, saved, index)))
    flags = {"share_parameters": share, "actors": [False, True] if share else [False] * 3 + [True] * 3}
    matrix, _ = cross_play(hopplus_ppo, saved_run(tmp_path, num_seeds=2, **flags), eval_games=600)
    of_seeds = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert seen[0].tolist() == (of_seeds if share else [3 * s + k % 3 for k, s in enumerate(of_seeds)])
    expected = [alone_among_stayers(seat) for seat in range(3)]
    error = math.hypot(*(error for _, error in expected)) / 3 * math.sqrt(4000 / 200)
    assert abs(matrix[0, 1] - np.mean([mean for mean, _ in expected])) < 5 * error
    assert (matrix[1] == 0).all() and matrix[0, 0] > 0.15


@both_scripts
def test_the_same_learners_under_other_names_are_all_alike(hop, tmp_path, monkeypatch):
    rollout, sums, summaries = hop.rollout, [], []

    def watched(*args, **more):
        found = rollout(*args, **more)
        if args[6] > 1:
            sums.append(found[2]["games"])
            summaries.append(args[4]["summary"].clone())
            assert args[0].forget == 0 and args[3].world is None
        return found

    config = dataclasses.replace(helpers.TINY_CONFIG, steps_after_first_hunt=0)  # games of different lengths
    path = saved_run(tmp_path, hop, num_seeds=3, method="hopplus", actors=[False] * 9, config=config)
    monkeypatch.setattr(hop, "rollout", watched)
    matrix, _ = cross_play(hop, path, eval_games=300, **({} if hop is hopplus_ppo else {"planner": "none"}))
    assert (sum(sums) == 100).all() and len(sums) == 4, "4 games in each of 25 places for every pair and seat"
    assert (summaries[0] != 0).any(), "with memories"
    deviation = 5 / 3 * 0.6 / math.sqrt(300)  # returns of such games deviate by less than 0.6
    assert matrix.max() - matrix.min() < 4 * deviation and matrix.min() > 0.1


def test_both_scripts_find_the_same_without_search_and_search_if_asked(tmp_path, monkeypatch):
    path = saved_run(tmp_path, num_seeds=2, method="ppo-omg")
    here, _ = cross_play(hopplus_ppo, path, eval_games=12)
    there, _ = cross_play(hopplus_mcts, path, eval_games=12, planner="none")
    assert np.array_equal(here, there)
    plan, planned = hopplus_mcts.plan, []
    monkeypatch.setattr(hopplus_mcts, "plan", lambda *args: (planned.append(len(args[3].time)), plan(*args))[1])
    other, _ = cross_play(hopplus_mcts, path, eval_games=12, num_simulations=2)
    assert set(planned) == {2 * 2 * 3 * 3} and other.shape == (2, 2)


@both_scripts
def test_the_interval_off_the_diagonal(hop):
    own, partner = np.array([0.3, 1.0, 2.2, -0.4]), np.array([0.5, 0.1, -0.2, 0.9])
    mean, half = hop.off_diagonal(own[:, None] + partner)  # each seed's effect is its own and that on others
    assert (mean, half) == pytest.approx(hop.interval((own + partner).tolist()))
    mean, half = hop.off_diagonal(np.array([[9.0, 1.0], [2.0, 9.0]]))
    assert mean == 1.5 and math.isnan(half)
