"""hopplus_ppo.py: networks side by side, what each learner sees and believes, and what its models learn"""

import copy
import dataclasses
import itertools
from unittest import mock

import hopplus_ppo as hop
from stag_hunt_env import STAY, planes, seats_table

import numpy as np
import pytest
import torch
from helpers import PRETRAINING_CASES, TINY_CONFIG, mixed_actions, random_kinds, seeded
from tiny_hopplus import (
    as_windows,
    co_players_there,
    encode,
    enlarge_moa,
    infer,
    make_args,
    make_state,
    make_watched,
    one_step,
    play,
    recorded,
)
from torch import nn


# ---- Networks side by side
def test_stacked_networks_are_the_networks_alone(no_noise):
    """Of one seed beside another. No loss draws random numbers here"""
    flags = {"subgoals": "actions", "num_envs": 8}
    both, alone = make_state(num_seeds=2, **flags), make_state(seed=2, **flags)
    steps, _ = play(both, 8)
    own = {name: x[3:] for name, x in steps.items()}
    found = []
    for state, given in ((both, steps), (alone, own)):
        now = one_step(given, 7)
        with torch.no_grad():
            outputs = hop.decide(state, infer(state, now))
            outputs["prior"] = state.networks["prior"](outputs["seen"])
        transition = [now[name] for name in ("joint", "next_board", "payoff")]
        world_loss = state.networks["world"](now["board"].float(), *transition, method="loss").mean(1)
        found.append(outputs | losses_of(state, as_windows(given)) | {"world": world_loss})
    for name, x in found[0].items():
        torch.testing.assert_close(x[3:], found[1][name], msg=name)
    (found[0]["losses/opponent_models"] + found[0]["world"])[4].backward()
    for name in ("inference", "moa", "world"):
        grads = [p.grad for p in both.networks[name].params.values() if p.grad is not None]
        assert any(grad[4].any() for grad in grads), name
        assert not any(grad[[0, 1, 2, 3, 5]].any() for grad in grads), "only the learner whose loss it is learns"


def test_first_weights_depend_on_the_seed_alone():
    """No two learners begin alike, nor do the models of two seeds; a seed's are the same beside others."""
    both, second = make_state(num_seeds=2), make_state(seed=2)
    assert second.env.generator.initial_seed() != torch.initial_seed(), "of deals, and of who sits where"
    for name, network in both.networks.items():
        for key, p in network.params.items():
            own = second.networks[name].params[key]
            assert torch.equal(p[-len(own) :], own), (name, key)
            assert not p.any() or len(p.flatten(1).unique(dim=0)) == len(p), f"two learners begin alike: {name} {key}"
    models = (both.networks[name] for name in ("prior", "inference", "moa"))
    for one, other in itertools.combinations([network.params["encoder.table"] for network in models], 2):
        assert (one != other).flatten(1).any(1).all(), "two networks of a learner begin alike"
    teacher = make_watched(num_seeds=2).networks
    for name in ("prior", "inference", "moa", "moa_prior", "world"):
        for key, p in teacher[name].params.items():
            assert not p.any() or (p[0] != p[1]).any(), f"two seeds are pretrained alike: {name} {key}"
    env = both.env
    games = env.observe(env.state).unflatten(0, (2, -1))
    assert (games[0] != games[1]).flatten(1).any(1).all(), "two seeds play the same first games"


def test_first_weights_of_a_layer_and_the_first_policy():
    layer = hop.Linear(300, 200, gain=2.0)
    assert float(layer.weight.detach().var()) == pytest.approx(2.0**2 / 300, rel=0.03) and not layer.bias.any()
    state = make_state("ppo")
    steps, _ = play(state, 4)
    read = (steps[name].flatten(1, 2) for name in hop.POLICY_READS)
    probs = state.networks["policy"](*read)[0].exp()
    legal = steps["legal"].flatten(1, 2)
    torch.testing.assert_close(probs, legal / legal.sum(2, keepdim=True), atol=0.02, rtol=0)


def test_a_layer_of_torch_and_whole_numbers_are_refused(monkeypatch, capsys):
    """The parameters of one from torch would be laid end to end along the wrong axis"""

    class Normed(hop.ActorCritic):
        def __init__(self, args):
            super().__init__(args)
            self.norm = nn.LayerNorm(args.policy_hidden)

    monkeypatch.setitem(hop.NETWORKS, "policy", Normed)
    with pytest.raises(SystemExit):
        make_state("ppo")
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1 and "Normed.norm.weight" in sentence and "[1, " in sentence
    with pytest.raises(SystemExit):  # it would round its weights
        hop.Linear(3, 2)(torch.ones(1, 5, 3, dtype=torch.uint8))
    assert "float" in capsys.readouterr().err


# ---- Rollout
def places(args):
    """(learner, row) -> (game, seat), in plain Python"""
    names, found = seats_table(args.seats, 3), {}
    seats, games = [i for i, name in enumerate(names) if name == "learner"], args.num_envs
    for s, (number, seat), e in itertools.product(range(args.num_seeds), enumerate(seats), range(games)):
        place = (s, number * games + e) if args.share_parameters else (s * len(seats) + number, e)
        found[place] = s * games + e, seat
    return found


SEATS = [(None, False), ("random,learner,learner", False), (None, True), ("learner,mixed,learner", True)]


@pytest.mark.parametrize(("seats", "share"), SEATS)
def test_a_rollout_holds_what_each_learner_saw_did_and_earned(seats, share, monkeypatch):
    """In its own ego order, actions beside the board they were taken on, and nothing of one game in the next. The
    reward is the shaped one, the payoff the game's."""
    monkeypatch.setattr(hop, "shape_reward", lambda state, payoff, *_: payoff + 100)
    config = dataclasses.replace(TINY_CONFIG, height=4, num_hares=2, num_stags=2, max_wall_pieces=2)
    changes = {"seats": seats, "share_parameters": share, "num_seeds": 2, "num_envs": 6, "subgoal_hidden": 16}
    state = make_state(config=config, **changes)
    env = state.env
    (steps, _), log = recorded(state, lambda: play(state, 14))
    steps["value"], last_value = steps["value"].split([14, 1], 1)
    previous, seen, kinds_before = None, set(), log[0][4]
    for t, (before, actions, reward, done, kinds) in enumerate(log):
        assert t == 0 or torch.equal(kinds[~log[t - 1][3]], kinds_before[~log[t - 1][3]]), "a player changed in a game"
        kinds_before = kinds
        after, *_ = env.transition(before, actions)
        now, later, legal = env.cells(before), env.cells(after), env.legal_actions(before)
        for (m, row), (b, i) in places(state.args).items():
            ego = [(i + k) % 3 for k in range(3)]
            w = {name: x[m, t, row] for name, x in steps.items()}
            walls = before.walls[b]
            assert torch.equal(w["board"], torch.cat([now[b, i], walls]))
            assert torch.equal(w["next_board"], torch.cat([later[b, i], walls]))
            assert w["joint"].tolist() == actions[b, ego].tolist() and w["action"] == actions[b, i]
            assert w["payoff"] == reward[b, i] and w["reward"] == reward[b, i] + 100 and w["done"] == done[b]
            assert float(w["clock"]) == pytest.approx(int(before.time[b]) / 6)
            assert w["first_hunt"] == before.first_hunt[b]
            last = [STAY] * 3 if before.time[b] == 0 else previous[b, ego].tolist()
            assert w["last_joint"].tolist() == last
            assert torch.equal(w["legal"], legal[b, i])
            there, leaves = bool(before.present[b, i]), bool(before.present[b, i] & ~after.present[b, i])
            assert w["mask"] == there, "a step counts while its learner can earn"
            assert w["ended"] == (leaves or done[b])
            seen |= {("done", bool(done[b])), ("earners", int((reward[b] > 0).sum())), int(before.time[b]) == 0}
            seen |= {("there", there), ("leaves", leaves)}
        previous = actions
    assert {("done", True), ("earners", 1), ("there", False), ("leaves", True), True, False} <= seen
    assert steps["board"].dtype == torch.uint8 and steps["board"][..., 7:].any()
    assert (steps["goals"] != 0).any(3).float().mean() > 0.95  # a tiny network may be silent about some boards
    read = (steps[name].flatten(1, 2) for name in hop.POLICY_READS)
    log_probs, value = (x.unflatten(1, (14, -1)) for x in state.networks["policy"](*read))
    torch.testing.assert_close(steps["value"], value)
    torch.testing.assert_close(steps["log_prob"], log_probs.gather(3, steps["action"])[..., 0])
    next_steps, _ = play(state, 1)
    torch.testing.assert_close(last_value, next_steps["value"][:, :1])


@pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
def test_views_of_a_board_are_those_of_the_game(config):
    state, generator = make_state("ppo", config=config, num_envs=40), seeded(3)
    env = state.env
    kinds, n, cells = random_kinds(env, generator), config.num_players, config.num_cells
    for _ in range(6):
        now = env.state
        legal, seen, others_legal = hop.views(env, state.games.boards(now).transpose(0, 1))
        seen = seen.unflatten(1, (40, n - 1))
        expected = env.seats_to_ego(env.legal_actions(now)).transpose(0, 1)
        assert torch.equal(legal, expected[:, :, 0])
        assert torch.equal(others_legal.unflatten(1, (40, n - 1)), expected[:, :, 1:])
        players = torch.where(now.present, now.position, cells)
        prey = torch.where(now.prey_alive, now.prey_position, cells)
        for i, k in itertools.product(range(n), range(1, n)):  # player i's view of how its k-th co-player sees it
            order = [(i + k + j) % n for j in range(n)]
            view = torch.cat([players[:, order], prey, now.walls[:, : config.num_wall_cells]], 1)
            assert torch.equal(seen[i, :, k - 1], view.float())
        env.step(mixed_actions(env, now, kinds, 0.2, generator))
    assert not env.state.present.all()


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_the_policy_may_read_predicted_actions(goal_kind):
    """--subgoals actions: MOA's probabilities given q_phi's mean, [M, n, K * 7]"""
    state = make_state(subgoals="actions", goal_kind=goal_kind, num_envs=8)
    enlarge_moa(state)  # else all actions are equally likely
    steps, _ = play(state, 10)
    for t in range(10):
        now = one_step(steps, t)
        mind = infer(state, now)
        clock = now["clock"].repeat_interleave(2, 1)
        mean = hop.goal_mean(state.args, mind["posterior"])
        with torch.no_grad():
            probs = state.networks["moa"](mind["seen"], clock, mean, mind["others_legal"]).exp()
        assert (probs[~mind["others_legal"]] == 0).all() and probs.std() > 0.05
        found = now["goals"].view(3, 16, 7)
        torch.testing.assert_close(found, probs, atol=2e-3, rtol=2e-2)  # histories are kept in half precision
        torch.testing.assert_close(hop.predict_actions(state, mind, None).flatten(2), mind["goals"])


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_predicted_actions_are_learned_by_their_own_loss_alone(goal_kind):
    state = make_state("ppo-omg", subgoals="actions", goal_kind=goal_kind, num_envs=16)
    windows = as_windows(play(state, 14)[0])
    state.eps.fill_(1.0)
    losses = losses_of(state, windows)
    assert torch.equal(losses["losses/opponent_models"], losses["losses/moa"]) and (losses["omg/recon"] > 0).all()
    again = losses_of(state, windows, seed=6)["losses/moa"]
    assert torch.equal(again, losses["losses/moa"]), "neither noise nor hindsight is in it"
    losses["losses/opponent_models"].sum().backward()
    moved = {name: moved_parameters(network) for name, network in state.networks.items()}
    inference = state.networks["inference"].params
    assert moved["inference"] == {name for name in inference if not name.startswith("decoder.")}
    assert moved["moa"] == set(state.networks["moa"].params) and not moved["policy"] and not moved["prior"]


# ---- Belief about co-players
def test_histories_are_in_each_co_players_own_order():
    state = make_state("ppo-omg")
    history = torch.rand(3, 4, 2, 16, generator=seeded(1))
    mind = infer(state, one_step(play(state, 1)[0], 0), history)
    never = torch.zeros(3, 4, dtype=torch.bool)

    def after(*joint):
        return hop.update_history(state, mind, torch.tensor(joint).expand(3, 4, 3), never)

    one = after(0, 5, 1)
    for other in ((0, 1, 5), (0, 5, 5), (0, 1, 1)):
        assert (one != after(*other)).any(3).all(), "every co-player's history should change"
    features = mind["features"].unflatten(1, (4, 2))
    for k, own_order in ((0, [5, 1, 0]), (1, [1, 0, 5])):
        joint = torch.tensor(own_order).expand(3, 4, 3)
        event = state.networks["inference"](features[:, :, k], joint, method="event")
        now, before = history[:, :, k].chunk(2, 2)
        torch.testing.assert_close(one[:, :, k], torch.cat([now + event, before], 2))


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_histories_add_up_within_a_game_and_fade_between_games(discount):
    """If each step leaves 0.25, and who is gone nothing: of this game the sum, of those before discount * (sum + what
    was left of those before them); in the first entry of both the number of steps"""
    state = make_state("ppo-omg", memory_discount=discount, history_reset_prob=0.0, num_envs=16)
    events = state.networks["inference"].params
    events["events.2.weight"].data.zero_()
    events["events.2.bias"].data.fill_(0.25)
    steps, _ = play(state, 24)
    there = co_players_there(steps, TINY_CONFIG)  # [M, T, E, K]
    now, before, games = torch.zeros(3, 16, 2), torch.zeros(3, 16, 2), torch.zeros(3, 16)
    event = torch.tensor([1.0] + [0.25] * 7)

    def expected():
        return torch.cat([now[..., None] * event, before[..., None] * event], 3)

    for t in range(24):
        torch.testing.assert_close(steps["history"][:, t], expected().bfloat16())
        now = now + there[:, t]
        over = steps["done"][:, t, :, None]
        now, before = torch.where(over, 0.0, now), torch.where(over, discount * (now + before), before)
        games += steps["done"][:, t]
    torch.testing.assert_close(state.games.history, expected())
    assert (games >= 2).all() and not there.all() and (before > 1).any() == (discount > 0)


def test_evidence_is_read_in_units_of_its_noise():
    """Sums over c steps as sum / sqrt(1 + c), of this game and of earlier ones apart"""
    history = torch.rand(3, 5, 16, generator=seeded(2))
    history[..., 0], history[..., 8] = 3.0, 99.0
    torch.testing.assert_close(hop.scale_history(history), history / torch.tensor([2.0] * 8 + [10.0] * 8))


def test_some_histories_are_reset_after_a_game_and_only_then():
    """Else a policy never meets strangers in training, and plays badly with them."""
    state, ends, resets = make_state("ppo-omg", num_envs=64, history_reset_prob=0.25), 0, 0
    apart = 0
    for _ in range(14):
        steps = one_step(play(state, 1)[0], 0)
        reset, done, history = steps["reset"], steps["done"], state.games.history
        assert not (reset & ~done).any() and (history[reset] == 0).all()
        assert (history[done & ~reset] != 0).any(2).all()
        ends, resets = ends + int(done.sum()), resets + int(reset.sum())
        apart += int((reset[0] != reset[1]).sum())
    assert 0.15 < resets / ends < 0.35 and ends > 200
    assert apart > 10, "learners of one game forget apart"


def test_nothing_is_remembered_of_players_who_are_drawn_anew():
    """And their memory goes on where nobody tells that somebody else has come (--unsteady)"""
    left = {}
    for seats, redraw in itertools.product((None, "learner,mixed,mixed"), ("game", "never", "0.5")):
        left[seats, redraw] = make_args(seats=seats, redraw=redraw).history_decay
    assert left.pop(("learner,mixed,mixed", "game")) == 0 and set(left.values()) == {0.9}
    assert make_args("ppo").history_decay == 0


def test_what_later_steps_read_in_a_history_trains_q_phi():
    """Its encoder too, whose features of earlier steps are in the events"""
    state = make_state("ppo-omg")
    encode(state, as_windows(play(state, 8)[0]))[:, -1].sum().backward()
    inference = state.networks["inference"]
    expected = {name for name in inference.params if name.startswith(("encoder.", "events."))}
    assert moved_parameters(inference) == expected


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_histories_along_a_window_are_those_of_the_rollout(discount):
    state = make_state("ppo-omg", memory_discount=discount, num_envs=8, history_reset_prob=0.5)
    play(state, 3)
    steps, _ = play(state, 13)
    histories = encode(state, as_windows(steps))
    torch.testing.assert_close(histories, steps["history"].float(), atol=5e-3, rtol=5e-3)  # kept in half precision
    assert steps["done"][:, :-1].any() and histories.abs().max() > 0.1


def test_divergence_and_samples_of_subgoals():
    continuous = make_args(goal_dim=3)
    discrete = make_args(goal_kind="discrete", goal_dim=6)
    q, p = torch.randn(2, 5, 6, generator=seeded(1))
    normal = [torch.distributions.Normal(x[:, :3], (0.5 * x[:, 3:]).exp()) for x in (q, p)]
    expected = torch.distributions.kl_divergence(*normal).sum(1)
    torch.testing.assert_close(hop.goal_kl(continuous, q, p), expected)
    category = [torch.distributions.Categorical(logits=x) for x in (q, p)]
    torch.testing.assert_close(hop.goal_kl(discrete, q, p), torch.distributions.kl_divergence(*category))
    noise = torch.randn(5, 3, generator=seeded(2))
    torch.testing.assert_close(hop.sample_goal(continuous, q, noise), normal[0].mean + noise * normal[0].stddev)
    assert torch.equal(hop.goal_mean(continuous, q), q[:, :3])
    torch.testing.assert_close(hop.goal_mean(discrete, q), category[0].probs)
    torch.manual_seed(1)
    logits = q[None, :1].expand(1, 20_000, 6).clone().requires_grad_()
    noise = hop.goal_noise(discrete, logits)
    drawn = hop.sample_goal(discrete, logits, noise)
    assert ((drawn - drawn.round()).abs() < 1e-5).all() and torch.allclose(drawn.sum(2), torch.ones(1, 20_000))
    frequency = drawn[0].mean(0)  # Gumbel noise draws from softmax
    torch.testing.assert_close(frequency, category[0].probs[0], atol=0.02, rtol=0)
    (gradient,) = torch.autograd.grad(drawn[..., 0].sum(), logits)
    soft = ((logits + noise) / 0.5).softmax(2)
    (expected,) = torch.autograd.grad(soft[..., 0].sum(), logits)
    torch.testing.assert_close(gradient, expected)  # straight through, at temperature 0.5
    drawn = hop.goal_noise(continuous, torch.zeros(2, 5000, 6))
    assert drawn.shape == (2, 5000, 3) and abs(float(drawn.mean())) < 0.03 and abs(float(drawn.std()) - 1) < 0.03


# ---- Model losses
def losses_of(state, windows, seed=5, learned=None, **changes):
    """opponent_losses of these windows: of the first `learned` steps, or of all"""
    steps = learned or windows["done"].shape[1]
    given = copy.copy(state)
    given.args = dataclasses.replace(state.args, num_steps=steps, **changes)
    torch.manual_seed(seed)
    with mock.patch.object(hop, "sample_replays", lambda *_, **__: windows):
        return hop.opponent_losses(given)


@pytest.fixture
def no_noise(monkeypatch):
    """Samples of subgoals are their means"""

    def zeros(args, params):
        return torch.zeros(*params.shape[:2], args.goal_dim)

    monkeypatch.setattr(hop, "goal_noise", zeros)


def read_and_compared(state, windows):
    """-> what MOA reads about subgoals, and what KL compares: q_phi, f_psi in hindsight"""
    moa = mock.Mock(wraps=state.networks["moa"])
    networks = mock.patch.dict(state.networks, {"moa": moa})
    with networks, mock.patch.object(hop, "goal_kl", wraps=hop.goal_kl) as goal_kl:
        losses_of(state, windows)
    _, q, p = goal_kl.call_args.args
    return moa.call_args.args[2], q, p


def moved_parameters(network):
    return {name for name, p in network.params.items() if p.grad is not None and p.grad.any()}


def random_games(m, steps, games, k, seed):
    """done [M, T, G], present [M, T, G, K]: nobody comes back before the next game; the number of the game [M, T, G]"""
    generator = np.random.default_rng(seed)
    done = generator.random((m, steps, games)) < 0.2
    present, number = np.ones((m, steps, games, k), bool), np.zeros((m, steps, games), int)
    for i, t, g in np.ndindex(m, steps, games):
        if t:
            number[i, t, g] = number[i, t - 1, g] + done[i, t - 1, g]
        stays = generator.random(k) < 0.8
        present[i, t, g] = stays if not t or done[i, t - 1, g] else present[i, t - 1, g] & stays
    return torch.tensor(present), torch.tensor(number)


@pytest.mark.parametrize("selection", ["conservative", "optimistic", "final"])
def test_hindsight_subgoals_by_brute_force(selection):
    """Of 9 steps, with 3 more that follow"""
    m, steps, ends, games, k, d = 3, 9, 12, 5, 2, 4
    state = make_state("ppo-omg", subgoal_horizon=3, subgoal_selection=selection, num_envs=steps * games)
    present, number = random_games(m, ends, games, k, seed=1)
    generator = seeded(2)
    goals = torch.randn(m, steps, games, k, d, generator=generator)
    prior = torch.randn(m, ends, games, k, 2 * d, generator=generator)
    board = state.games.boards(state.env.state).transpose(0, 1).unflatten(1, (steps, games))
    clock = torch.rand(m, steps, games, generator=generator)
    joint = torch.randint(7, (m, steps, games, 3), generator=generator)
    windows = {"board": board, "clock": clock, "last_joint": joint}
    ahead = (number[:, :steps, None] == number[:, None])[..., None] & present[:, None]
    with torch.no_grad():
        ours = hop.hindsight_goals(state, windows, goals, prior, ahead)
    chosen_ahead = 0
    for i, t, g, j in np.ndindex(m, steps, games, k):
        same = [u for u in range(ends) if number[i, u, g] == number[i, t, g] and present[i, u, g, j]]
        later = [u for u in same if t < u <= t + 3]
        expected = t
        if selection == "final":
            expected = max([t, *(u for u in same if u >= t)])
        elif later:
            tried = goals[i, t, g].repeat(len(later), 1, 1)
            tried[:, j] = prior[i, later, g, j, :d]
            fields = [x[i, t, g].expand(m, len(later), *x.shape[3:]) for x in windows.values()]
            legal = torch.ones(m, len(later), 7, dtype=torch.bool)
            tried = tried.flatten(1).expand(m, -1, -1)
            with torch.no_grad():
                _, value = state.networks["policy"](*fields, tried, legal)
            value = value[i].tolist()
            expected = later[value.index((min if selection == "conservative" else max)(value))]
        assert torch.equal(ours[i, t, g, j], prior[i, expected, g, j]), (i, t, g, j)
        chosen_ahead += expected > t + 1
    assert chosen_ahead > 10


def mean_over_games(steps, values):
    """values [M, T, G, K] of steps -> [M], in plain Python: over the steps with the co-player on the board, then
    over its games"""
    found, there = [], co_players_there(steps, TINY_CONFIG)
    for m in range(len(values)):
        means = []
        for e, k in np.ndindex(values.shape[2:]):
            seen = []
            for t in range(values.shape[1]):
                if there[m, t, e, k]:
                    seen.append(float(values[m, t, e, k]))
                if seen and (steps["done"][m, t, e] or t == values.shape[1] - 1):
                    means.append(np.mean(seen))
                    seen = []
        found.append(np.mean(means))
    return found


def test_moa_reads_subgoals_of_the_same_game_now_or_earlier(no_noise):
    """Never of a later step, another game or another co-player"""
    state = make_state("ppo-omg", num_envs=64)
    windows = as_windows(play(state, 14)[0])
    read, posterior, _ = read_and_compared(state, windows)
    goals = hop.goal_mean(state.args, posterior).view(3, 14, 64, 2, -1)
    equal = (read.view(3, 14, 1, 64, 2, -1) - goals[:, None]).abs().amax(5) < 1e-6  # [M, t, u, G, K]
    clock = torch.arange(14)
    number = windows["game_number"]
    allowed = (number[:, :, None] == number[:, None])[..., None] & (clock <= clock[:, None])[..., None, None]
    assert (equal & allowed).any(2).all()
    ages = allowed.sum(2) - 1  # [M, T, G, 1]
    for age in (1, 2, 3):
        own = equal[:, clock, clock][(ages == age).expand(3, 14, 64, 2)].float().mean()
        assert own == pytest.approx(0.5 + 0.5 / (age + 1), abs=0.06)


def test_hindsight_is_what_moa_reads_in_a_share_of_its_training(monkeypatch):
    state = make_state("ppo-omg", num_envs=16)
    windows = as_windows(play(state, 8)[0])
    monkeypatch.setattr(hop, "hindsight_goals", lambda *_: torch.full((3, 8, 16, 2, 8), 7.0))
    for eps in (0.0, 0.3, 1.0):
        state.eps.fill_(eps)
        read, q, p = read_and_compared(state, windows)
        assert (read == 7).all(2).float().mean() == pytest.approx(eps, abs=0.0 if eps in (0, 1) else 0.06)
        assert (p == 7).all() and q.requires_grad and not p.requires_grad, "KL(q_phi || f_psi(s^g)), f_psi stays"
    losses = losses_of(state, windows)
    expected = losses["losses/moa"] + losses["omg/recon"] + state.args.kl_coef * losses["omg/kl"]
    torch.testing.assert_close(losses["losses/opponent_models"], expected)


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
@pytest.mark.parametrize(("reader", "speaker"), [("moa", "inference"), ("moa_prior", "prior")])
def test_subgoals_are_shaped_by_the_actions_that_they_tell(reader, speaker, goal_kind):
    """A MOA's cross-entropy moves the network that names the subgoal: another MOA moves it elsewhere"""
    state = make_watched("ppo-omg", goal_kind=goal_kind, num_envs=16)
    windows = as_windows(play(state, 8)[0])
    head = [p for name, p in state.networks[speaker].params.items() if name.startswith("head.")]
    gradients = []
    for factor in (1.0, 100.0):
        state.networks[reader].params["head.4.weight"].data.mul_(factor)
        loss = losses_of(state, windows)["losses/opponent_models"]
        gradients.append(torch.autograd.grad(loss.sum(), head))
    assert all((one != other).flatten(1).any(1).all() for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("subgoals", ["inferred", "actions"])
def test_losses_are_those_of_steps_with_the_co_player(subgoals, no_noise):
    """Each loss of 7 steps against a plain sum: of the action taken in s_t; of s_t as the co-player sees it; of the KL
    to f_psi of the last state before it left, within the 7 steps that follow too"""
    state = make_state("ppo-omg", subgoals=subgoals, num_envs=32, subgoal_selection="final")
    networks, args = state.networks, state.args
    steps, _ = play(state, 14)
    enlarge_moa(state)
    networks["moa"].params["head.0.weight"].data[:, -args.goal_dim :] = 0  # which subgoal it reads: no matter
    losses = losses_of(state, as_windows(steps), learned=7)
    there = co_players_there(steps, TINY_CONFIG)
    nll, recon, kl = torch.zeros(3, 3, 7, 32, 2)
    with torch.no_grad():
        histories = encode(state, as_windows(steps))
        minds = [infer(state, one_step(steps, t), histories[:, t]) for t in range(14)]
        prior = torch.stack([networks["prior"](mind["seen"]).unflatten(1, (32, 2)) for mind in minds], 1)
        for t, mind in enumerate(minds[:7]):
            probs = hop.predict_actions(state, mind, torch.zeros(3, 64, 4))
            action = steps["joint"][:, t, :, 1:].long()
            nll[:, t] = -probs.gather(3, action[..., None])[..., 0].log()
            goal = hop.goal_mean(args, mind["posterior"])
            history = hop.scale_history(histories[:, t].flatten(1, 2))
            logits = networks["inference"](torch.cat([goal, history], 2), method="decoder")
            board = planes(TINY_CONFIG, steps["board"][:, t, :, :7], steps["board"][:, t, :, 7:])
            in_own_order = [board[:, :, [1, 2, 0, 3, 4, 5]], board[:, :, [2, 0, 1, 3, 4, 5]]]
            target = torch.stack(in_own_order, 2).flatten(1, 2).flatten(2).float()
            error = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
            recon[:, t] = error.mean(2).unflatten(1, (32, 2))
            final = torch.zeros_like(prior[:, 0])
            for m, e, k in np.ndindex(3, 32, 2):
                last = t
                while last < 13 and not steps["done"][m, last, e] and there[m, last + 1, e, k]:
                    last += 1
                final[m, e, k] = prior[m, last, e, k]
            kl[:, t] = hop.goal_kl(args, mind["posterior"].unflatten(1, (32, 2)), final)
    for name, values in {"losses/moa": nll, "omg/recon": recon, "omg/kl": kl}.items():
        assert losses[name].tolist() == pytest.approx(mean_over_games(steps, values), rel=1e-4), name
    assert (~there).sum() > 20
    losses["omg/recon"].sum().backward()
    inference = networks["inference"]
    assert moved_parameters(inference) == set(inference.params), "what is inferred is what reconstructs"


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_in_preparation_f_psi_is_kept_near_a_standard_normal(goal_kind, no_noise):
    """Where f_psi says the same of every state, its KL is known; and hindsight is of the last state"""
    state = make_watched("ppo-omg", goal_kind=goal_kind, num_envs=16)
    windows = as_windows(play(state, 14)[0])
    kl = [losses_of(state, windows, subgoal_selection=x)["omg/kl"].tolist() for x in ("conservative", "final")]
    assert kl[0] == kl[1]
    prior = state.networks["prior"]
    said = torch.randn_like(prior.params["head.bias"])  # [M, parameters]
    prior.params["head.weight"].data.zero_()
    prior.params["head.bias"].data.copy_(said)
    if goal_kind == "continuous":
        q = torch.distributions.Normal(said[:, :4], (0.5 * said[:, 4:]).exp())
        vae_kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
    else:
        q = torch.distributions.Categorical(logits=said)
        vae_kl = torch.distributions.kl_divergence(q, torch.distributions.Categorical(logits=torch.zeros_like(said)))
    assert (vae_kl > 0.01).all()
    for pretraining in (False, True):
        state.pretraining = pretraining
        without, with_kl = (losses_of(state, windows, kl_coef=x) for x in (0.0, 0.5))
        expected = without["losses/opponent_models"] + 0.5 * (without["omg/kl"] + pretraining * vae_kl)
        torch.testing.assert_close(with_kl["losses/opponent_models"], expected)


# ---- What is learned from: the last rollouts, and games that are watched
def numbered(rollouts=1, m=3, steps=8, games=4, first=0):
    """Steps whose payoff is 1000 * rollout + 100 * learner + 10 * step + game"""
    found = []
    for r in range(first, first + rollouts):
        axes = torch.meshgrid(*(torch.arange(n) for n in (m, steps, games)), indexing="ij")
        value = 1000 * r + 100 * axes[0] + 10 * axes[1] + axes[2]
        found.append(dict.fromkeys(hop.REPLAYED, value.float()) | {"done": value < 0})
    return found


def test_the_replay_keeps_the_last_rollouts_and_gives_each_learner_its_own():
    games = make_state().games  # of two rollouts
    for count, steps in enumerate(numbered(5), 1):
        games.push(steps)
        found = games.sample(400)["payoff"][:, 0]
        assert found.shape == (3, 400)
        assert len((found % 100).unique(dim=0)) == len(found), "each draws for itself"
        for row, values in enumerate(found.int().tolist()):
            assert {v // 100 % 10 for v in values} == {row}
            assert {v // 1000 for v in values} == set(range(max(0, count - 2), count))
            assert {v % 100 for v in values} == {10 * t + e for t in range(8) for e in range(4)}
        windows = games.sample(50, 1)["payoff"].int()
        assert windows.shape == (3, 8, 50)
        assert (windows - windows[:, :1] == 10 * torch.arange(8).view(1, 8, 1)).all()
        assert (windows // 100 % 10 == torch.arange(3).view(3, 1, 1)).all() and len(windows[0, 0].unique()) > 3


@pytest.mark.parametrize("pushed", [1, 2, 3, 5])
def test_windows_of_two_rollouts_are_one_after_the_other(pushed):
    """Where none follows yet, nothing that comes there belongs to the same game"""
    games = make_state(replay_rollouts=3).games
    for steps in numbered(pushed):
        games.push(steps)
    windows = games.sample(200, 2)
    value, last = windows["payoff"].int(), windows["done"][:, 7]  # [M, 16, 200], [M, 200]
    assert (value[:, :8] - value[:, :1] == 10 * torch.arange(8).view(1, 8, 1)).all() and value.shape == (3, 16, 200)
    follows = value[:, 8] - value[:, 0] == 1000
    assert torch.equal(last, ~follows) and torch.equal(last, value[:, 0] // 1000 == pushed - 1)
    assert not windows["done"][:, :7].any() and (pushed == 1 or follows.any())
    assert torch.equal(windows["game_number"][:, 8] > 0, last) and not windows["game_number"][:, :8].any()
    assert torch.equal(windows["history"][:, 0].int(), value[:, 0]), "that of the first step"


@pytest.mark.parametrize(
    ("ratio", "count", "old"), [(0.0, 40, 0), (0.25, 40, 10), (1.0, 40, 40), (0.05, 8, 1), (0.5, 2, 1), (0.99, 8, 7)]
)
def test_rule_based_games_make_up_their_share(ratio, count, old):
    """And where both kinds are asked for, both come"""
    state = make_state()
    state.games.push(numbered()[0])
    state.watched.push(numbered(first=7)[0])
    for rollouts in (None, 1):
        found = hop.sample_replays(state, ratio, count, rollouts)["payoff"]
        assert found.shape[2] == count and ((found >= 7000).sum(2) == old).all()
    state.watched = None
    assert (hop.sample_replays(state, ratio, 40)["payoff"] < 7000).all()


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_watched_players_stay_if_they_are_remembered(discount):
    """Else a history would be of somebody else; but in --unsteady places nobody stays"""
    state = make_state("ppo-omg", memory_discount=discount, num_envs=32)
    teacher = make_watched("ppo-omg", memory_discount=discount, num_envs=16)
    for owner, games in ((state, state.watched), (teacher, teacher.games)):
        first = games.seats.kinds.clone()
        changed = torch.zeros_like(first, dtype=torch.bool)
        for _ in range(2):  # in the course of which every game ends
            play(owner, 8, games=games)
            changed |= games.seats.kinds != first
        number = torch.arange(len(changed)) % games.seats.num_envs
        may_change = number < 0.5 * games.seats.num_envs  # in each block the first
        if discount == 0:
            may_change[:] = True
        assert not changed[~may_change].any() and changed[may_change].float().mean() > 0.5
