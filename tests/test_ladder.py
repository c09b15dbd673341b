"""Games in which it pays to know the others: the scripted hunter, games together"""

import csv
import dataclasses

import hopplus_mcts as mcts
import hopplus_ppo as hop
import stag_hunt_env as game
from evaluation import bayes_hunter, partners, runs
from evaluation.posterior import Posterior

import numpy as np
import pytest
import torch
from helpers import untrained
from test_adapt import refusal
from test_frozen_players import recurrent

SMALL = game.StagHuntConfig(num_stags=2, final_time=5)
POPULATION = ("first_stag", "last_stag", "nearest_hare")


def test_where_a_bayes_hunter_goes():
    """Its posterior is set by hand: who comes to which stag is then known, and the rest is arithmetic."""
    config = game.StagHuntConfig(height=4, width=6, num_stags=2, final_time=9)
    env = game.StagHuntEnv(config, 400, "cpu", 3)
    env.state.time.copy_(torch.randint(0, 9, (400,)))
    env.state.present[:100, 3] = False
    population = ("first_stag", "last_stag", "nearest_stag", "nearest_hare")
    table = ["nearest_hare", "nearest_hare", "learner", "nearest_hare"]
    posterior = Posterior(game.Seats(env, [table], population=population))
    logits = 3 * torch.randn(400, 4, 4, generator=torch.manual_seed(4)) + 5 * torch.eye(4)[3]  # often a hare hunter
    posterior.log_joint.copy_(logits.log_softmax(2)[:, :, None])
    probs, seen = bayes_hunter.bayes_probs(env, posterior.seats, posterior), {"stag": 0, "hare": 0}
    assert probs.shape == (1, 400, 7)
    position, prey = env.state.position.tolist(), env.state.prey_position.tolist()
    likely = posterior.probs()
    for b in range(400):
        left = 9 - int(env.state.time[b])
        distance = [[abs(c // 6 - q // 6) + abs(c % 6 - q % 6) for c in position[b]] for q in prey[b]]
        pays = []
        for s in (0, 1):
            nobody = 1.0
            for i in (0, 1, 3):
                nearer = distance[s][i] <= distance[1 - s][i]
                kinds = prey[b][s] < prey[b][1 - s], prey[b][s] > prey[b][1 - s], nearer
                comes = sum(float(likely[b, i, k]) for k in range(3) if kinds[k])
                in_time = max(distance[s][i], distance[s][2]) < left and bool(env.state.present[b, i])
                nobody *= 1 - comes * in_time
            pays.append(5 * (1 - nobody))
        nearest = min(distance[q][2] for q in range(2, 6))
        hare = float(nearest < left)
        stag = max(pays) > hare
        tie = max(pays) == hare == 0 or abs(max(pays) - hare) < 1e-4
        if tie or (stag and abs(pays[0] - pays[1]) < 1e-4):
            continue
        goals = [prey[b][pays.index(max(pays))]] if stag else [prey[b][q] for q in range(2, 6)]
        seen["stag" if stag else "hare"] += 1
        for action in probs[0, b].nonzero().flatten().tolist():
            if action in (game.HUNT_STAG, game.HUNT_HARE):
                assert position[b][2] in goals and (action == game.HUNT_STAG) == stag
            else:
                cell = position[b][2] + (-6, 6, -1, 1)[action]
                steps = [abs(cell // 6 - q // 6) + abs(cell % 6 - q % 6) for q in goals]
                assert min(steps) == (distance[prey[b].index(goals[0])][2] if stag else nearest) - 1
    assert min(seen.values()) > 60, seen


# ---- partners.py


ONE = {"seats": "learner,mixed,nearest_hare,nearest_hare", "population": ",".join(POPULATION)}
TINY = ONE | {"config": SMALL, "num_seeds": 2, "redraw": "never"}


def make_run(folder, script, method="ppo-omg", **changes):
    flags = TINY | changes
    if script in ("gru", "liam"):
        return recurrent(folder, model=script, **flags)
    return untrained(folder, method, script, **flags)


@pytest.fixture
def seated(monkeypatch):
    """-> a list of the states that tools seat, and of who sat there at first: [(state, kinds)]"""
    found, own = [], runs.seat_learners

    def seat_learners(*given, **changes):
        state = own(*given, **changes)
        found.append((state, state.games.seats.kinds.clone()))
        return state

    monkeypatch.setattr(runs, "seat_learners", seat_learners)
    return found


def play_partners(folder, **flags):
    usual = {"run": str(folder), "places": 7, "games_together": 3, "device": "cpu"}
    return partners.main(partners.Args(**usual | flags))


@pytest.mark.parametrize("script", [hop, "gru", "liam"], ids=["hop", "gru", "liam"])
def test_the_first_games_count_place_by_place(script, tmp_path, seated, monkeypatch):
    """Of each game the learner's return, in order; each place has as many"""
    config = dataclasses.replace(SMALL, steps_after_first_hunt=0)
    folder = make_run(tmp_path / "run", script, config=config)
    games = [[] for _ in range(14)]
    advance = game.StagHuntEnv.advance

    def watched(env, actions, *more):
        outcome = advance(env, actions, *more)
        for b in outcome[2].nonzero().flatten().tolist() if len(seated) == 1 else ():  # not those that are shuffled
            games[b].append(float(env.final_return[b, 0]))
        return outcome

    monkeypatch.setattr(game.StagHuntEnv, "advance", watched)
    rows = play_partners(folder, games_together=6)
    assert min(map(len, games)) >= 6 and max(map(len, games)) > 6
    expected = np.array([of_place[:6] for of_place in games]).reshape(2, 7, 6).mean(1)
    for number, row in enumerate(rows):
        seed, together = number % 2, number // 2
        assert (row["seed"], row["game"]) == (1 + seed, 1 + together)
        assert row["return"] == pytest.approx(expected[seed, together])
    with open(folder / "partners.csv", newline="") as file:
        assert [float(row["return"]) for row in csv.DictReader(file)] == [row["return"] for row in rows]
    assert ("shuffled" in rows[0]) == (script is hop)


@pytest.mark.parametrize("redraw", ["game", "never"])
@pytest.mark.parametrize("script", [hop, "gru"], ids=["hop", "gru"])
def test_partners_stay_whatever_the_training_did(script, redraw, tmp_path, seated, capsys):
    """And what is carried over to the next game is what was carried over in training"""
    folder = make_run(tmp_path / "run", script, redraw=redraw)
    play_partners(folder)
    state, kinds = seated[0]
    assert torch.equal(state.games.seats.kinds, kinds) and kinds[:, 1].unique().tolist() == [0, 1, 2]
    keeps = redraw != "game"
    if script == "gru":
        assert state.args.keep_state == keeps and state.args.state_reset_prob == 0
    else:
        _, before = state.games.history.chunk(2, -1)
        assert before.any().item() == keeps
        assert state.args.history_reset_prob == 0
    said = capsys.readouterr().out
    assert (f"trained with --redraw {redraw}; here every partner stays" in said) == (redraw != "never")


def test_other_partners_may_sit_in_mixed_seats(tmp_path, seated):
    """Strangers too, but learners in one seat only"""
    several = make_run(tmp_path / "several", hop, seats="learner,learner,random,random")
    sentence = "there must be one learner, such as learner,mixed,mixed,mixed"
    assert sentence in refusal(partners.main, partners.Args(run=str(several), device="cpu"))
    folder = make_run(tmp_path / "run", hop)
    play_partners(folder, population="nearest_stag,left_stag")
    state, kinds = seated[0]
    names = {state.games.seats.names[kind] for kind in kinds[:, 1].tolist()}
    assert names == {"nearest_stag", "left_stag"}
    assert (folder / "partners_nearest_stag_left_stag.csv").exists()


SEARCH = {"method": "hopplus-mcts", "num_trees": 3, "num_simulations": 2}


@pytest.mark.parametrize(
    ("script", "changes"),
    [(hop, {}), (mcts, SEARCH), (mcts, SEARCH | {"infer_in_tree": True})],
)
def test_shuffled_subgoals_are_those_of_another_place(script, changes, tmp_path):
    """Of policy, search and, in the tree, of MOA; what is remembered stays one's own"""
    run = runs.load_run(str(make_run(tmp_path / "run", script, **changes)), None, "cpu")
    state = runs.seat_learners(run, [TINY["seats"].split(",")] * 2, [0, 1], num_envs=7, num_steps=1)
    history = state.games.history
    history.copy_(torch.rand(history.shape, generator=torch.Generator().manual_seed(3)))
    before = {name: x.clone() for name, x in vars(state.games).items() if isinstance(x, torch.Tensor)}
    random = torch.get_rng_state()
    env_state = game.State(*(x.clone() for x in state.env.state))

    def of_next_place(x):  # [M, 7 places and what each has, ...]
        return x.unflatten(1, (7, -1)).roll(1, 1).flatten(1, 2)

    arms = []
    for shuffled in (False, True):
        if shuffled:
            partners.shuffle_subgoals(run, 7)
        seen = []
        decide = run.script.decide
        run.script.decide = lambda state, mind, seen=seen, decide=decide: seen.append(mind) or decide(state, mind)
        for x, old in zip(state.env.state, env_state, strict=True):
            x.copy_(old)
        for name, x in before.items():
            getattr(state.games, name).copy_(x)
        torch.set_rng_state(random)
        run.script.rollout(state, state.games)
        run.script.decide = decide
        arms.append(seen)
    for number in (0, 1) if script is mcts else (0,):  # the rollout's own, and the trees' roots
        own, other = arms[0][number], arms[1][number]
        assert own["goals"].shape[1] == 7 * (3 if number else 1)
        for name in ("goals", "posterior"):
            assert torch.equal(of_next_place(own[name]), other[name]), (number, name)
            assert not torch.equal(own[name], other[name])
        assert torch.equal(own["board"], other["board"]) and torch.equal(own["history"], other["history"])
