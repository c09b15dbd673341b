"""Games in which it pays to know the others: the scripted hunter, games together"""

import csv
import dataclasses
from pathlib import Path

import hopplus_mcts as mcts
import hopplus_ppo as hop
import stag_hunt_env as game
from benchmarks import scripted
from benchmarks.baselines import ppo_gru
from evaluation import partners

import numpy as np
import pytest
import torch
from helpers import write_checkpoint

SMALL = game.StagHuntConfig(num_stags=2, final_time=5)
POPULATION = ("first_stag", "last_stag", "nearest_hare")


@pytest.mark.parametrize(("others", "expected"), [
    (("nearest_stag",) * 3, 2.88),
    (("nearest_hare",) * 3, 0.95),
    (("random", "nearest_hare", "nearest_stag"), 4.98),
])  # fmt: skip
def test_a_bayes_hunter_finds_out_who_hunts_with_it(others, expected):
    config = game.StagHuntConfig(height=8, width=8)
    args = scripted.Args(places=300, games=1, device="cpu", config=config)
    returns = scripted.play(args, [*others[:1], "learner", *others[1:]])
    assert float(returns.mean()) == pytest.approx(expected, abs=3.5 * float(returns.std()) / 300**0.5 + 0.01)


def test_where_a_bayes_hunter_goes():
    """Its posterior is set by hand: who comes to which stag is then known, and the rest is arithmetic."""
    config = game.StagHuntConfig(height=4, width=6, num_stags=2, final_time=9)
    env = game.StagHuntEnv(config, 400, "cpu", 3)
    env.state.time.copy_(torch.randint(0, 9, (400,)))
    env.state.present[:100, 3] = False
    population = ("first_stag", "last_stag", "nearest_stag", "nearest_hare")
    seats = game.Seats(env, [["nearest_hare", "nearest_hare", "learner", "nearest_hare"]], population=population)
    logits = 3 * torch.randn(400, 4, 4, generator=torch.manual_seed(4)) + 5 * torch.eye(4)[3]  # often a hare hunter
    seats.log_posterior.copy_(logits.log_softmax(2))
    probs, posterior, seen = scripted.bayes_probs(env, seats), seats.posterior(), {"stag": 0, "hare": 0}
    assert probs.shape == (1, 400, 7)
    position, prey = env.state.position.tolist(), env.state.prey_position.tolist()
    for b in range(400):
        left = 9 - int(env.state.time[b])
        distance = [[abs(c // 6 - q // 6) + abs(c % 6 - q % 6) for c in position[b]] for q in prey[b]]
        pays = []
        for s in (0, 1):
            nobody = 1.0
            for i in (0, 1, 3):
                kinds = prey[b][s] < prey[b][1 - s], prey[b][s] > prey[b][1 - s], distance[s][i] <= distance[1 - s][i]
                comes = sum(float(posterior[b, i, k]) for k in range(3) if kinds[k])
                in_time = max(distance[s][i], distance[s][2]) < left and bool(env.state.present[b, i])
                nobody *= 1 - comes * in_time
            pays.append(5 * (1 - nobody))
        nearest = min(distance[q][2] for q in range(2, 6))
        hare = float(nearest < left)
        stag = max(pays) > hare
        if max(pays) == hare == 0 or abs(max(pays) - hare) < 1e-4 or (stag and abs(pays[0] - pays[1]) < 1e-4):
            continue  # a tie
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


def test_games_are_counted_place_by_place():
    done = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()  # [T, B]: 2 seeds, 2 places
    returns = torch.arange(16.0).view(4, 4)
    found = partners.by_game(lambda: (done, returns), 2, 2, 2)
    # first games: returns 0, 5 and 10, 3; second: 8, 9 and 14, 7
    assert found.tolist() == [[[0, 8], [5, 9]], [[10, 14], [3, 7]]]


ONE = {"seats": "learner,mixed,nearest_hare,nearest_hare", "population": ",".join(POPULATION), "num_seeds": 2}
TINY = ONE | {"config": SMALL, "num_envs": 4, "num_steps": 8, "redraw": "never"}
NETWORKS = {
    "policy_hidden": 8,
    "subgoal_hidden": 8,
    "goal_dim": 4,
    "wm_hidden": 8,
    "num_simulations": 2,
    "imagination_horizon": 5,
}


def untrained(folder, script=hop, method="ppo-omg", **changes):
    """A checkpoint of learners that are not trained; of ppo_gru.py one for each seed"""
    folder.mkdir()
    if script is ppo_gru:
        args = ppo_gru.make_args("cpu", **{**TINY, "hidden": 8, **changes})
        _, _, agent, _, _ = ppo_gru.make_training(args)
        paths = tuple(str(folder / f"{number}.pt") for number in range(args.num_seeds))
        for number, path in enumerate(paths):
            ppo_gru.save_checkpoint(path, args, agent, number)
        return paths
    sizes = {name: x for name, x in NETWORKS.items() if script is mcts or name != "num_simulations"}
    args = script.make_args(method, "cpu", **{**TINY, **sizes, **changes})
    table = game.seats_table(args.seats, SMALL.num_players)
    state = script.make_train_state(args, [table] * args.num_seeds, [1, 2], torch.device("cpu"))
    content = {"format": script.FORMAT, "args": dataclasses.asdict(args), "states": [state.state_dict()]}
    content["script"] = {"name": Path(script.__file__).name, "sha256": "of another version"}
    write_checkpoint(folder / "checkpoint.pt", content)
    return (str(folder / "checkpoint.pt"),)


def play_partners(monkeypatch, paths, watched, **flags):
    """Runs partners.py and records the calls of these functions of the script. -> what it returns, the calls as (name,
    what was given, what came back)"""
    calls, load_run = [], partners.runs.load_run

    def record(module, name):
        own = getattr(module, name)

        def recorded(*given, **more):
            found = own(*given, **more)
            calls.append((name, given, found))
            return found

        monkeypatch.setattr(module, name, recorded)

    def load(*given):
        run = load_run(*given)
        for name in watched:
            record(run.script, name)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(partners.runs, "load_run", load)
        for name in watched:
            if hasattr(ppo_gru, name):
                record(ppo_gru, name)
        usual = {"paths": paths, "places": 7, "games_together": 3, "device": "cpu"}
        found = partners.main(partners.Args(**usual | flags))
    return found, calls


def test_what_is_earned_in_each_game_together(tmp_path, monkeypatch):
    """Of both kinds of learners, with their own partners and with others"""
    inferred = untrained(tmp_path / "inferred", subgoals="inferred")
    found, _ = play_partners(monkeypatch, inferred, [])
    rows = list(csv.DictReader((tmp_path / "inferred/partners.csv").open()))
    assert [(row["seed"], row["game"]) for row in rows] == [(s, g) for s in "01" for g in "123"]
    assert np.mean([float(row["return"]) for row in rows]) == pytest.approx(found["return"])
    assert found.keys() == {"return", "shuffled"}
    found, calls = play_partners(
        monkeypatch, untrained(tmp_path / "none", method="ppo"), ["Games"], population="nearest_stag"
    )
    assert found.keys() == {"return"} and (tmp_path / "none/partners_nearest_stag.csv").exists()
    ((_, _, games),) = calls
    assert {games.seats.names[kind] for kind in games.seats.kinds[:, 1]} == {"nearest_stag"}
    gru = untrained(tmp_path / "gru", ppo_gru, state_reset_prob=1.0)
    found, calls = play_partners(monkeypatch, gru, ["make_games", "rollout"], population="nearest_stag,nearest_hare")
    assert found.keys() == {"return"} and (tmp_path / "gru/partners_nearest_stag_nearest_hare.csv").exists()
    (_, seats, _), *batches = (result for _, _, result in calls)
    _, _, _, agent, _ = calls[1][1]
    assert {seats.names[kind] for kind in seats.kinds[:, 1]} == {"nearest_stag", "nearest_hare"}
    saved = [torch.load(path, weights_only=True)["agent"] for path in gru]
    assert all(torch.equal(p, torch.cat([x[name] for x in saved])) for name, p in agent.state_dict().items())
    assert batches[0]["reset"][:, 0].all() and sum(int(batch["done"].sum()) for batch in batches) >= 42
    assert sum(int(batch["reset"].sum()) for batch in batches) == 14, "only before the first game"


@pytest.mark.parametrize("redraw", ["game", "0.5", "never"])
@pytest.mark.parametrize("script", [hop, ppo_gru], ids=["hop", "gru"])
def test_partners_stay_whatever_the_training_did(script, redraw, tmp_path, monkeypatch, capsys):
    """And what is carried over to the next game is what was carried over in training"""
    kept = {"keep_state": redraw != "game"} if script is ppo_gru else {}
    paths = untrained(tmp_path / "run", script, redraw=redraw, **kept)
    seen = []
    own = game.Seats.update

    def update(seats, actions, present, done):
        seen.append(seats.kinds.clone())
        own(seats, actions, present, done)

    monkeypatch.setattr(game.Seats, "update", update)
    _, calls = play_partners(monkeypatch, paths, ["rollout"])
    arms = 1 if script is ppo_gru else 2
    first, second = seen[0], seen[len(seen) // arms - 1]
    assert torch.equal(first, second) and first[:, 1].unique().tolist() == [0, 1, 2]
    _, _, played = calls[0]
    if script is ppo_gru:
        assert played["done"].any() and (played["reset"][:, 1:].any() == (redraw == "game"))
    else:
        transitions = played[0]
        begun = transitions.history[:, 1:][transitions.time[:, 1:] == 0]
        assert len(begun) > 3 and begun.any() == (redraw != "game")
    said = capsys.readouterr().out
    assert (f"trained with --redraw {redraw}; here every partner stays" in said) == (redraw != "never")


@pytest.mark.parametrize(("script", "changes"), [
    (hop, {"subgoals": "inferred"}),
    (mcts, {"method": "hopplus-mcts", "num_trees": 3, "subgoals": "inferred"}),
    (mcts, {"method": "hopplus-mcts", "num_trees": 3, "subgoals": "inferred", "infer_in_tree": True}),
])  # fmt: skip
def test_shuffled_subgoals_are_those_of_another_place(script, changes, tmp_path, monkeypatch):
    """Of policy, search and, in the tree, of MOA; not of a sibling's tree, and what is remembered stays one's own"""
    seat_learners, play = partners.runs.seat_learners, partners.runs.play

    def with_memories(*given, **changes):  # other ones in each place
        state, generator = seat_learners(*given, **changes), torch.Generator().manual_seed(3)
        history = state.games.history
        history.copy_(torch.rand(history.shape, generator=generator))
        return state

    monkeypatch.setattr(partners.runs, "seat_learners", with_memories)
    monkeypatch.setattr(partners.runs, "play", lambda run, state, _, infer: play(run, state, 2, infer))
    names = ["Games", "evaluate_policy", *(["plan_actions"] if script is mcts else [])]
    _, calls = play_partners(monkeypatch, untrained(tmp_path / "run", script, **changes), names, games_together=1)
    _, second = (k for k, (name, _, _) in enumerate(calls) if name == "Games")
    arms = calls[:second], calls[second:]

    def of_next_place(x):  # [M, 7 places and what each has, ...]
        return x.unflatten(1, (7, -1)).roll(1, 1).flatten(1, 2)

    def read(name, number):
        return [[given for called, given, _ in arm if called == name][number] for arm in arms]

    for number in (0, 1) if script is mcts else (0,):  # the rollout's own, and the trees' first
        true, shuffled = (given[-1] for given in read("evaluate_policy", number))
        assert true.shape[1] == 7 * (3 if number else 1)
        assert torch.equal(of_next_place(true), shuffled) and not torch.equal(true, shuffled)
    if script is mcts:
        (*_, true, _), (*_, shuffled, _) = read("plan_actions", 0)
        assert torch.equal(of_next_place(true.params), shuffled.params)
        assert torch.equal(true.board, shuffled.board)


@pytest.mark.parametrize("script", [hop, ppo_gru], ids=["hop", "gru"])
def test_a_stranger_sits_in_mixed_seats(script, tmp_path, monkeypatch):
    """And the population stays that of the training"""
    paths = untrained(tmp_path / "run", script)
    seated = []
    own = game.Seats.update

    def update(seats, actions, present, done):
        seated.append(seats)
        own(seats, actions, present, done)

    monkeypatch.setattr(game.Seats, "update", update)
    play_partners(monkeypatch, paths, [], population="left_stag")
    for seats in seated:
        named = [seats.names[kind] for kind in seats.kinds[0, 1:].tolist()]
        assert named == ["left_stag", "nearest_hare", "nearest_hare"] and seats.population == list(POPULATION)
    assert (tmp_path / "run/partners_left_stag.csv").exists()


def test_runs_that_do_not_fit_are_named(tmp_path):
    gru, one = untrained(tmp_path / "gru", ppo_gru), untrained(tmp_path / "one", method="ppo")
    wide = untrained(tmp_path / "wide", ppo_gru, hidden=16)
    refused = [
        (one + gru, {}, "PATHS: only runs of ppo_gru.py have several"),
        ((gru[0], wide[1]), {}, r"1.pt: .* is not that of .*0.pt's flags"),
        (gru, {"seats": "learner,learner,random,random"}, "there must be 1 learner"),
    ]
    for paths, flags, sentence in refused:
        with pytest.raises(game.UserError, match=sentence):
            partners.main(partners.Args(paths=paths, device="cpu", **flags))
