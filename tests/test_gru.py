"""Learners of ppo_gru.py in the tools of evaluation/: frozen, learning as they play, and as co-players of others"""

import csv
import dataclasses
import itertools

import stag_hunt_env as game
from benchmarks.baselines import ppo_gru
from evaluation import adapt, gru, partners

import numpy as np
import pytest
import torch

CONFIG = game.StagHuntConfig(height=3, width=4, num_players=3, num_hares=3, final_time=6)
TINY = {
    "config": CONFIG,
    "seats": "learner,mixed,mixed",
    "population": "random,nearest_stag,nearest_hare",
    "num_seeds": 2,
    "num_envs": 4,
    "num_steps": 8,
    "hidden": 8,
    "seed": 3,
}
FAST = "--device cpu --steps 32 --every 8 --repetitions 6 --games-at-once 2 --imagined-games 5 --no-references"
SEATS = "--seats learner,nearest_hare,nearest_stag"


def untrained(folder, redraw="0.5", **changes):
    """-> checkpoints of learners that are not trained, one for each seed"""
    args = ppo_gru.make_args("cpu", redraw, **{**TINY, **changes})
    _, _, agent, _, _ = ppo_gru.make_training(args)
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number}.pt" for number in range(args.num_seeds)]
    for number, path in enumerate(paths):
        ppo_gru.save_checkpoint(path, args, agent, number)
    return [str(path) for path in paths]


def read(paths, words=""):
    return adapt.parse_args([*paths, *FAST.split(), *SEATS.split(), *words.split()])


def start(paths, mode, words=""):
    args = read(paths, words)
    tables, index = adapt.deal_seats(args, adapt.co_player_sets(args))
    return gru.gru_loop(args, args.run, tables, index, mode)


def watch(monkeypatch, module, name):
    """-> a list of all calls: what was given, what came back"""
    own = getattr(module, name)
    calls = []

    def watched(*given):
        result = own(*given)
        calls.append((given, result))
        return result

    monkeypatch.setattr(module, name, watched)
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# As a learner in adapt.py


def test_adaptation_of_all_seeds(tmp_path, monkeypatch):
    """The learner sits in each seat; repetition r has the weights of seed r // 3 % 2, whatever the paths' order"""
    paths = untrained(tmp_path)
    made = watch(monkeypatch, ppo_gru, "make_games")
    played = watch(monkeypatch, ppo_gru, "rollout")
    scores = adapt.main(read(reversed(paths), "--modes frozen learning"))
    assert scores.keys() == {"frozen/nearest_hare + nearest_stag", "learning/nearest_hare + nearest_stag"}
    tables = [["learner", "nearest_hare", "nearest_stag"]]
    tables += [["nearest_stag", "learner", "nearest_hare"], ["nearest_hare", "nearest_stag", "learner"]]
    assert [given[1] for given, _ in made] == [tables * 2] * 4, "frozen, learning, to practise in, held out"
    agent = played[0][0][3]
    for name, p in agent.named_parameters():
        of_seed = [torch.load(path, weights_only=True)["agent"][name] for path in paths]
        assert torch.equal(p, torch.cat([of_seed[0]] * 3 + [of_seed[1]] * 3)), name
    (rows,) = tmp_path.glob("*_repetitions.csv")
    rows = list(csv.DictReader(rows.open()))
    assert [(row["seed"], row["seat"]) for row in rows] == [(seed, seat) for seed in "34" for seat in "012"]


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_frozen_learner_earns_and_remembers(keeps, tmp_path, monkeypatch):
    """Its memory goes on from round to round; from game to game as in training, and never ends by chance"""
    played = watch(monkeypatch, ppo_gru, "rollout")
    paths = untrained(tmp_path, keep_state=keeps, state_reset_prob=0.9)
    rounds = list(start(paths, "frozen"))
    batches = [batch for _, batch in played]
    assert len(rounds) == 4 and len(batches) == 4 * 4, "as many sequences a round as there are minibatches"
    done, reset, final_return = (torch.cat([b[name] for b in batches], 1) for name in ("done", "reset", "final_return"))
    assert done.shape == (6, 32, 2) and reset[:, 0].all()
    assert torch.equal(reset[:, 1:], done[:, :-1] & (not keeps))
    for before, after in itertools.pairwise(batches):
        agent = played[0][0][3]
        state = agent(before["x"], before["legal"], before["reset"], before["state"])[2]
        torch.testing.assert_close(state, after["state"])
    for number, (earned, metrics) in enumerate(rounds):
        steps = slice(8 * number, 8 * number + 8)
        ended = done[:, steps]
        returns = ended * final_return[:, steps]
        assert list(metrics) == ["test steps"] and metrics["test steps"].tolist() == [0] * 6
        for m in range(6):
            assert earned[m].tolist() == pytest.approx([float(returns[m].sum()), int(ended[m].sum())])
    assert {tuple(p.shape[:1]) for p in agent.parameters()} == {(6,)} and done.sum() >= 6 * 2 * 5


def test_learners_learn_from_practice_and_act_with_it(tmp_path, monkeypatch):
    """Where a test, made up here, says that they gain by it"""
    calls = []

    def play_held_out(*_):
        calls.append(0)
        return torch.full((6,), float(len(calls) % 2)), torch.zeros(6), 100  # first the new weights

    monkeypatch.setattr(gru, "play_held_out", play_held_out)
    played = watch(monkeypatch, ppo_gru, "rollout")
    weights = []
    own = ppo_gru.ppo_update

    def update(args, agent, optimizer, batch):
        before = gru.copy_params(agent)
        own(args, agent, optimizer, batch)
        weights.append((before, gru.copy_params(agent)))
        found.append((args, batch))

    found = []
    monkeypatch.setattr(ppo_gru, "ppo_update", update)
    rounds = start(untrained(tmp_path), "learning", "--learning-rate 0.01 --update-epochs 3 --ent-coef 0.2")
    _, metrics = next(rounds)
    args, batch = found[0]
    assert (args.learning_rate, args.update_epochs, args.ent_coef, args.num_minibatches) == (0.01, 3, 0.2, 4)
    assert batch["x"].shape[:3] == (6, 2, 4) and batch["state"].shape[:2] == (6, 4)
    assert metrics["policy changed"].all() and metrics["test steps"].tolist() == [208] * 6
    for number, (given, of_round) in enumerate(played[4:]):
        assert given[1].num_envs == 6, "one game of each"
        complete = ppo_gru.with_advantages(args, of_round)
        for name, x in batch.items():
            axis = 1 if name == "state" else 2
            assert torch.equal(x.select(axis, number), complete[name].select(axis, 0)), name
    next(rounds)
    (first_before, first_after), (second_before, _) = weights
    for name, p in first_after.items():
        moved = (p - first_before[name]).flatten(1).abs().amax(1)
        assert torch.equal(p, second_before[name]) and (moved > 1e-3).all(), name
    (_, _, _, agent, _), own = played[8]
    assert agent is played[0][0][3] and own["x"].shape[2] == 2, "its own two games"
    log_probs, _, _ = agent(*(own[name] for name in ("x", "legal", "reset", "state")))
    agent.load_state_dict(first_after)
    acted, _, _ = agent(*(own[name] for name in ("x", "legal", "reset", "state")))
    told = acted.gather(3, own["action"][..., None]).squeeze(3)
    torch.testing.assert_close(told, own["log_prob"])
    assert (log_probs - acted).abs().max() > 1e-3


def test_guarded_learners_keep_their_weights_unless_the_new_ones_are_better(tmp_path, monkeypatch):
    """Tests are made up here: of six learners 0 to 2 gain a lot, 3 loses, 4 and 5 gain less than two standard errors.
    In the second round 0 to 2 lose as much, 4 and 5 gain once more, 5 too little."""
    calls = []
    error = torch.full((6,), 0.125)
    gains = torch.tensor([[4.0, 4.0, 4.0, -4.0, 0.9, 0.9], [-4.0, -4.0, -4.0, 0.0, 1.0, 0.5]])

    def play_held_out(run, flags, play, rollout_state):
        agent = played[-1][0][3]
        calls.append(gru.copy_params(agent))
        is_new = len(calls) % 2
        return 1 + is_new * gains[(len(calls) - 1) // 2], error, 100

    starts = []
    own = ppo_gru.ppo_update

    def update(args, agent, *given):
        starts.append(gru.copy_params(agent))
        own(args, agent, *given)

    monkeypatch.setattr(ppo_gru, "ppo_update", update)
    monkeypatch.setattr(gru, "play_held_out", play_held_out)
    played = watch(monkeypatch, ppo_gru, "rollout")
    rounds = start(untrained(tmp_path), "learning", "--learning-rate 0.01")
    _, first = next(rounds)
    agent = played[0][0][3]
    acts = gru.copy_params(agent)
    assert first["policy changed"].tolist() == [True] * 3 + [False] * 3
    assert first["held-out return"].tolist() == [5.0] * 3 + [1.0] * 3
    assert first["test steps"].tolist() == [8 + 200] * 6, "it practised for a round"
    new, old = calls
    for name, p in acts.items():
        assert torch.equal(p[:3], new[name][:3]) and torch.equal(p[3:], old[name][3:]), name
        assert (new[name] != old[name]).flatten(1).any(1).all(), name
    _, second = next(rounds)
    # 0.7 * 0.9 + 1.0 = 1.63 > 2 * sqrt(0.25 * (1 + 0.7**2)) = 1.22 > 1.13 = 0.7 * 0.9 + 0.5
    assert second["policy changed"].tolist() == [False] * 4 + [True, False]
    assert second["test steps"].tolist() == [416] * 6
    assert all(torch.equal(p, calls[3][name]) for name, p in old.items()), "compared with what it came with"
    assert all(torch.equal(p, starts[1][name]) for name, p in new.items()), "learning goes on, used or not"


def test_held_out_games_and_steps_are_counted(tmp_path, monkeypatch):
    """Each is a second game with what is remembered of the first game; every step that is not its own counts"""
    played = watch(monkeypatch, ppo_gru, "rollout")
    held_out = watch(monkeypatch, gru, "play_held_out")
    rounds = start(untrained(tmp_path), "learning")
    _, metrics = next(rounds)
    of_games = {}
    for (flags, env, *_), batch in played:
        of_games.setdefault(env.num_envs, []).append((flags, batch))
    own, practice, tests = (of_games[6 * number] for number in (2, 1, 5))
    assert len(own) == len(practice) == 4 and len(held_out) == 2
    steps = sum(batch["done"].shape[1] * batch["done"].shape[2] for _, batch in practice + tests)
    assert metrics["test steps"].tolist() == [steps] * 6
    remembered = played[0][0][4]  # nobody played on in its own games since then
    _, (mean, squared_error, steps) = held_out[0]
    calls = steps // (8 * 5)
    for first in (0, calls):  # of the new weights, of the old ones
        batch = tests[first][1]
        assert torch.equal(batch["state"], remembered.state[:, :1].expand(-1, 5, -1)) and batch["state"].any()
        assert torch.equal(batch["x"][:, 0, :, -1], remembered.last_reward[:, :1].expand(-1, 5))
    batches = [batch for _, batch in tests[:calls]]
    done, returns = (torch.cat([batch[name] for batch in batches], 1) for name in ("done", "final_return"))
    for m in range(6):
        second = []
        for e in range(5):
            ends = done[m, :, e].nonzero().flatten().tolist()
            second.append(float(returns[m, ends[1], e]))
        assert float(mean[m]) == pytest.approx(np.mean(second))
        assert float(squared_error[m]) == pytest.approx(np.var(second, ddof=1) / 5)


# ---------------------------------------------------------------------------------------------------------------------
# As a co-player


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("changes", [{}, {"max_wall_pieces": 1, "height": 4}])
def test_a_co_player_acts_as_in_training(keeps, changes, tmp_path, monkeypatch):
    """Beside itself, in rollouts of ppo_gru.py, over many games: in every step the same probabilities, and elsewhere 0.
    A player in two seats of half of the games has a memory for each."""
    config = dataclasses.replace(CONFIG, **changes)
    paths = untrained(tmp_path, keep_state=keeps, config=config)
    run = gru.load_run(paths[:1], "cpu")
    args = dataclasses.replace(run.args, num_steps=40, num_envs=6)
    env, seats, rollout_state = ppo_gru.make_games(args, ["random,learner,nearest_stag"])
    agent = gru.load_agent(run, [0])
    is_own = torch.tensor([[False, True, False]]).repeat(6, 1)
    alone = gru.GruPlayers(run, env, is_own)
    is_own[::2, 2] = True
    twice = gru.GruPlayers(run, env, is_own)
    action_probs, step, steps = seats.action_probs, env.step, []

    def watched_probs(state, learner_probs):
        ours, both = alone.probs(state), twice.probs(state)
        assert torch.equal(alone.probs(state), ours), "asked again, it says the same"
        torch.testing.assert_close(ours[:, 1], learner_probs[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(both[:, 1], learner_probs[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(both.sum(2), is_own.float())
        assert not ours[:, [0, 2]].any() and not both[1::2, 2].any()
        steps.append(both.clone())
        return action_probs(state, learner_probs)

    def watched_step(actions):
        result = step(actions)
        alone.update(actions, result[3])
        twice.update(actions, result[3])
        return result

    monkeypatch.setattr(seats, "action_probs", watched_probs)
    monkeypatch.setattr(env, "step", watched_step)
    batch = ppo_gru.rollout(args, env, seats, agent, rollout_state)
    assert len(steps) == 40 and batch["done"].sum() >= 6 * 5
    for ours, theirs in zip(alone.memory, rollout_state, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    others = torch.stack(steps)[:, ::2]
    assert (others[:, :, 2] - others[:, :, 1]).abs().max() > 1e-3


def test_a_co_player_of_another_game_is_refused(tmp_path):
    run = gru.load_run(untrained(tmp_path)[:1], "cpu")
    env = game.StagHuntEnv(dataclasses.replace(CONFIG, width=5))
    with pytest.raises(game.UserError, match=r"0.pt was trained in another game: width 4$"):
        gru.GruPlayers(run, env, torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.cuda
def test_all_of_it_runs_on_a_gpu(tmp_path):
    """And a co-player never waits for the host"""
    paths = untrained(tmp_path)
    words = [*FAST.replace("cpu", "cuda").split(), *SEATS.split()]
    scores = adapt.main(adapt.parse_args([*paths, *words]))
    assert len(scores) == 2 and all(0 <= score <= 10 for score in scores.values())
    flags = {"games_together": 3, "places": 8, "device": "cuda"}
    found = partners.main(partners.Args(paths=tuple(paths), **flags))
    assert found.keys() == {"return"}
    env = game.StagHuntEnv(CONFIG, 8, "cuda", 1)
    run = gru.load_run(paths[:1], "cuda")
    players = gru.GruPlayers(run, env, torch.ones(8, 3, dtype=torch.bool))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            probs = players.probs(env.state)
            actions = game.sample(probs)
            _, _, done = env.advance(actions)
            players.update(actions, done)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(probs.sum(2), torch.ones(8, 3, device="cuda"))


def test_seeds_that_do_not_follow_each_other_are_refused(tmp_path):
    path, _ = untrained(tmp_path)
    with pytest.raises(game.UserError, match="the seeds must follow each other, not 3, 3"):
        read([path, path])


def test_flags_of_ppo_gru_can_be_changed(tmp_path):
    paths = untrained(tmp_path, redraw="game", keep_state=False)
    assert not read(paths).run.args.keep_state
    assert read(paths, "-- --keep-state").run.args.keep_state
