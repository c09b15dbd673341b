"""hopplus_ppo.py: networks side by side, what each learner sees and believes, and what its models learn"""

import copy
import dataclasses
import functools
import itertools

import hopplus_ppo as hop
from stag_hunt_env import STAY, StagHuntEnv, planes, seats_table

import numpy as np
import pytest
import torch
from helpers import (
    PRETRAINING_CASES,
    TINY_CONFIG,
    mixed_actions,
    random_kinds,
    same_tree,
    seeded,
)
from tiny_hopplus import (
    CPU,
    add_moa_prior,
    co_players_there,
    encode,
    enlarge_moa,
    infer,
    make_args,
    make_state,
    make_watched,
    one_step,
    play,
    read_inputs,
    recorded,
    train,
    views,
    watch_networks,
)
from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Networks side by side


@pytest.fixture(scope="module")
def network_cases():
    """name -> how to make one, inputs [M, n, ...], method"""
    state = make_state()
    steps = one_step(play(state, 3)[0], 2)
    belief = infer(state, steps, steps.history.float() + 0.1)
    config, args = TINY_CONFIG, state.args
    noise = torch.randn(3, 8, args.goal_dim, generator=seeded(1))
    clock = torch.rand(3, 8, generator=seeded(2))
    history = torch.rand(3, 8, 16, generator=seeded(3))
    joint = torch.randint(7, (3, 8, 3), generator=seeded(4))
    belief_inputs = belief.board, belief.walls
    board, walls, legal = (x[:, :, 0] for x in views(state, steps))
    inputs = hop.policy_inputs(args, board, walls, clock[:, :4], steps.last_joint, belief.goals)
    features, goals = (x.detach() for x in state.networks.policy(inputs, method="features"))
    step = steps.board, steps.walls.float(), steps.joint
    world = functools.partial(hop.WorldModel, config, args)
    inference = functools.partial(hop.SubgoalInference, config, args)
    prior = functools.partial(hop.SubgoalPrior, config, args)
    moa = functools.partial(hop.ActionModel, config, args)
    return {
        "policy": (functools.partial(hop.ActorCritic, config, args), (inputs, legal), "forward"),
        "policy's features": (functools.partial(hop.ActorCritic, config, args), (inputs,), "features"),
        "value": (functools.partial(hop.ActorCritic, config, args), (features, goals), "value"),
        "prior": (prior, belief_inputs, "forward"),
        "prior's decoder": (prior, (noise,), "reconstruct"),
        "features": (inference, belief_inputs, "encoder"),
        "event": (inference, (belief.features, joint), "event"),
        "posterior": (inference, (belief.features, history), "forward"),
        "posterior's decoder": (inference, (noise, history), "reconstruct"),
        "moa": (moa, (*belief_inputs, clock, noise, belief.legal), "forward"),
        "world": (world, step, "predict"),
        "world's loss": (world, (*step, steps.next_board, steps.reward), "loss"),
    }


def leaves(outputs):
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def test_stacked_networks_are_the_networks_alone(network_cases):
    before = torch.get_rng_state()
    for name, (make, inputs, method) in network_cases.items():
        stacked, pair = hop.Stacked(make, [11, 12, 13], CPU), hop.Stacked(make, [11, 12], CPU)
        assert len(stacked) == 3 and torch.equal(torch.get_rng_state(), before), "others' random numbers stay the same"
        outputs, fewer = leaves(stacked(*inputs, method=method)), leaves(pair(*(x[:2] for x in inputs), method=method))
        found = []
        for m, seed in enumerate((11, 12, 13)):
            torch.manual_seed(seed)
            alone = make()
            found.append(leaves(getattr(alone, method)(*(x[m : m + 1] for x in inputs))))
            for weight, p in zip(stacked.parameters(), alone.parameters(), strict=True):
                assert len(p) == 1 and torch.equal(weight[m], p[0])
        torch.set_rng_state(before)
        for i, output in enumerate(outputs):
            torch.testing.assert_close(output, torch.cat([each[i] for each in found]), msg=f"{name} {i}")
            assert torch.equal(output[:2], fewer[i]), f"{name} changes when a learner is added"
        floats = [x for x in outputs if x.requires_grad]
        if floats and method != "predict":
            sum(x[1].sum() for x in floats).backward()
            grads = [p.grad for p in stacked.parameters() if p.grad is not None]
            assert any(grad[1].any() for grad in grads) and not any(grad[[0, 2]].any() for grad in grads), name


def test_first_weights_depend_on_the_seed_alone():
    """No two learners begin alike, nor do the models of two seeds; a seed's are the same beside others."""
    both, second = make_state(num_seeds=2), make_state(seed=2)
    for name, stacked in both.networks.present().items():
        for key, p in stacked.params.items():
            own = getattr(second.networks, name).params[key]
            assert torch.equal(p[-len(own) :], own), (name, key)
            assert not p.any() or len(p.flatten(1).unique(dim=0)) == len(p), f"two learners begin alike: {name} {key}"
    networks = both.networks
    for one, other in itertools.combinations((networks.prior, networks.inference, networks.moa), 2):
        table, other_table = (network.params["encoder.table"] for network in (one, other))
        assert (table != other_table).flatten(1).any(1).all(), "two networks of a learner begin alike"
    watched = make_watched(num_seeds=2).networks
    for name in ("prior", "inference", "moa", "moa_prior", "world"):
        for key, p in getattr(watched, name).params.items():
            assert not p.any() or (p[0] != p[1]).any(), f"two seeds are pretrained alike: {name} {key}"
    env = both.games.env
    games = env.observe(env.state).unflatten(0, (2, -1))
    assert (games[0] != games[1]).flatten(1).any(1).all(), "two seeds play the same first games"


def test_first_weights_of_a_layer_and_the_first_policy():
    layer = hop.Linear(300, 200, gain=2.0)
    assert float(layer.weight.detach().var()) == pytest.approx(2.0**2 / 300, rel=0.03) and not layer.bias.any()
    _, outputs, _ = play(make_state(), 4)
    legal = outputs["legal"]
    uniform = legal / legal.sum(3, keepdim=True)
    torch.testing.assert_close(outputs["log_probs"].exp(), uniform, atol=0.02, rtol=0)


def test_half_precision_where_nobody_learns(network_cases):
    """--precision bf16: in every network, inside it only; what learns keeps float32 unless it asks"""
    for name, (make, inputs, method) in network_cases.items():
        exact = hop.Stacked(make, [11, 12, 13], CPU)
        half = hop.Stacked(make, [11, 12, 13], CPU, dtype=torch.bfloat16)
        both = hop.Stacked(make, [11, 12, 13], CPU, torch.bfloat16, torch.bfloat16)
        expected = leaves(exact(*inputs, method=method))
        assert all(map(torch.equal, leaves(half(*inputs, method=method)), expected)), name
        with torch.no_grad():
            rounded = leaves(half(*inputs, method=method))
        learning = leaves(both(*inputs, method=method))
        for x, y, z in zip(expected, rounded, learning, strict=True):
            assert x.dtype == y.dtype == z.dtype and torch.equal(y, z), name
            if x.requires_grad:
                assert not torch.equal(x, y), f"{name} computes in float32"
                torch.testing.assert_close(x, y, atol=0.05, rtol=0.05, msg=name)


def test_a_layer_of_torch_is_refused():
    """Its parameters would be laid end to end along the wrong axis"""
    with pytest.raises(ValueError, match=r"use Linear, not nn\.Linear"):
        hop.Stacked(lambda: torch.nn.Linear(3, 2), [1, 2], CPU)


def test_whole_numbers_are_refused():
    """A layer computes in the numbers that it reads, and would round its weights"""
    with pytest.raises(TypeError, match="rounded"):
        hop.Linear(3, 2)(torch.ones(1, 5, 3, dtype=torch.uint8))


def test_weights_are_loaded_in_place_or_refused():
    make = functools.partial(hop.Linear, 3, 2)
    stacked, other = (hop.Stacked(make, seeds, CPU) for seeds in ([1, 2], [3, 4]))
    held = stacked.parameters()
    stacked.load_state_dict(other.state_dict())
    assert all(p is q for p, q in zip(held, stacked.parameters(), strict=True))
    assert same_tree(stacked.state_dict(), other.state_dict())
    with pytest.raises(ValueError, match=r"\bweight"):
        stacked.load_state_dict(hop.Stacked(make, [1, 2, 3], CPU).state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Rollout


def test_deals_and_who_sits_where_come_from_other_random_numbers():
    state = make_state(seats="learner,mixed,mixed")
    assert state.games.env.generator.initial_seed() != torch.initial_seed()


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
def test_a_rollout_holds_what_each_learner_saw_did_and_earned(seats, share):
    """In its own ego order, actions beside the board they were taken on, and nothing of one game in the next"""
    config = dataclasses.replace(TINY_CONFIG, height=4, num_hares=2, num_stags=2, max_wall_pieces=2)
    changes = {"seats": seats, "share_parameters": share, "num_seeds": 2, "num_envs": 6, "subgoal_hidden": 16}
    state = make_state(config=config, **changes)
    (w, out, episodes), log = recorded(state, lambda: play(state, 14))
    previous, seen, kinds_before = None, set(), log[0][4]
    for t, (before, actions, reward, done, kinds) in enumerate(log):
        assert t == 0 or torch.equal(kinds[~log[t - 1][3]], kinds_before[~log[t - 1][3]]), "a player changed in a game"
        kinds_before = kinds
        env = state.games.env
        after, *_ = env.transition(before, actions)
        now, later, legal = env.cells(before), env.cells(after), env.legal_actions(before)
        assert torch.equal(episodes["done"][t], done)
        for (m, row), (b, i) in places(state.args).items():
            ego = [(i + k) % 3 for k in range(3)]
            assert torch.equal(w.board[m, t, row], now[b, i]) and torch.equal(w.next_board[m, t, row], later[b, i])
            assert w.joint[m, t, row].tolist() == actions[b, ego].tolist()
            assert w.reward[m, t, row] == reward[b, i] and w.done[m, t, row] == done[b]
            assert w.time[m, t, row] == before.time[b] and w.first_hunt[m, t, row] == before.first_hunt[b]
            assert w.walls[m, t, row].tolist() == before.walls[b].tolist()
            last = [STAY] * 3 if before.time[b] == 0 else previous[b, ego].tolist()
            assert w.last_joint[m, t, row].tolist() == last
            assert torch.equal(out["legal"][m, t, row], legal[b, i])
            left = hop.exited(config, w.board[m, t, row], w.next_board[m, t, row])
            assert torch.equal(left, (before.present & ~after.present)[b, ego])
            seen |= {("done", bool(done[b])), ("earners", int((reward[b] > 0).sum())), int(before.time[b]) == 0}
        previous = actions
    assert {("done", True), ("earners", 1), True, False} <= seen
    assert w.board.dtype == w.walls.dtype == torch.uint8 and w.walls.any()
    found = read_inputs(config, out["inputs"])
    for name in ("board", "walls", "last_joint"):
        assert torch.equal(found[name], getattr(w, name).to(found[name].dtype)), name
    assert torch.equal(found["goals"], out["goals"])
    torch.testing.assert_close(found["clock"], w.time / 6)
    assert (out["goals"] != 0).any(3).float().mean() > 0.95  # a tiny network may be silent about some boards


@pytest.mark.parametrize("method", ["ppo", "hopplus"])
def test_the_last_value_is_that_of_the_state_after_the_rollout(method):
    """From which the next rollout begins"""
    state = make_state(method, num_envs=8)
    first, second = (play(state, 5)[1]["value"] for _ in range(2))
    torch.testing.assert_close(first[:, 5], second[:, 0])
    assert (first[:, 5] - first[:, 4]).abs().mean() > 0.01


@pytest.mark.parametrize("config", PRETRAINING_CASES.values(), ids=PRETRAINING_CASES)
def test_views_of_a_board_are_those_of_the_game(config):
    env, generator = StagHuntEnv(config, 40, seed=2), seeded(3)
    kinds, n, cells = random_kinds(env, generator), config.num_players, config.num_cells
    for _ in range(6):
        state = env.state
        board = env.cells(state).transpose(0, 1)
        seen_walls = state.walls[:, : config.num_wall_cells].expand(n, -1, -1)
        entities, walls, legal = hop.entity_views(env, board, seen_walls)
        own = hop.entity_views(env, board, seen_walls, 1)
        assert all(torch.equal(x, y[:, :, :1]) for x, y in zip(own, (entities, walls, legal), strict=True))
        expected_legal = env.seats_to_ego(env.legal_actions(state)).transpose(0, 1)
        assert torch.equal(legal, expected_legal)
        for i, k in itertools.product(range(n), range(n)):  # player i's view of how its k-th co-player sees it
            order = [(i + k + j) % n for j in range(n)]
            players = torch.where(state.present, state.position, cells)[:, order]
            alive = torch.where(state.prey_alive, state.prey_position, cells)
            assert torch.equal(entities[i, :, k], torch.cat([players, alive], 1).long())
            assert torch.equal(walls[i, :, k], seen_walls[i].float())
        env.step(mixed_actions(env, state, kinds, 0.2, generator))
    assert not env.state.present.all()


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_the_policy_may_read_predicted_actions(goal_kind):
    """--subgoals actions: MOA's probabilities given q_phi's mean, [M, n, K * 7]"""
    state = make_state(subgoals="actions", goal_kind=goal_kind, num_envs=8)
    state.networks.moa.params["head.4.weight"].data.mul_(100.0)  # else all actions are equally likely
    inference, moa = state.networks.inference, state.networks.moa
    w, out, _ = play(state, 10)
    assert out["goals"].shape == (3, 10, 8, 2 * 7)
    assert torch.equal(read_inputs(TINY_CONFIG, out["inputs"], 7)["goals"], out["goals"])
    for t in range(10):
        steps = one_step(w, t)
        history, clock = steps.history.float(), steps.time / 6
        entities, walls, legal = views(state, steps)
        with torch.no_grad():
            for k in (0, 1):
                seen = entities[:, :, 1 + k], walls[:, :, 1 + k]
                params = inference(inference(*seen, method="encoder"), history[:, :, k])
                mean = params[..., :4] if goal_kind == "continuous" else params.softmax(-1)
                probs = moa(*seen, clock, mean, legal[:, :, 1 + k]).exp()
                found = out["goals"][:, t, :, 7 * k : 7 * k + 7]
                torch.testing.assert_close(found, probs, atol=2e-3, rtol=2e-2)  # histories are kept in half precision
                assert (found[~legal[:, :, 1 + k]] == 0).all() and found.std() > 0.05
            belief = infer(state, steps, history)
            noise = hop.goal_noise(state.args, 3, 16, device=CPU)
            predicted = hop.predict_actions(state.args, state.networks, belief, clock, noise).exp()
        torch.testing.assert_close(predicted.flatten(2), belief.goals)


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_predicted_actions_are_learned_by_their_own_loss_alone(goal_kind):
    state = make_state("ppo-omg", subgoals="actions", goal_kind=goal_kind, num_envs=16)
    w, _, _ = play(state, 14)
    losses = model_losses(state, w)
    assert torch.equal(losses["loss"], losses["moa"]) and (losses["recon"] > 0).all()
    with torch.no_grad():
        torch.manual_seed(6)
        again = hop.opponent_model_losses(state.args, state.games.env, state.networks, w, 1.0)["moa"]
    assert torch.equal(again, losses["moa"]), "neither noise nor hindsight is in it"
    losses["loss"].sum().backward()
    moved = {name for name, p in state.networks.inference.params.items() if p.grad is not None and p.grad.any()}
    assert moved == {name for name in state.networks.inference.params if not name.startswith("decoder.")}
    assert all(p.grad.any() for p in state.networks.moa.parameters())
    others = state.networks.policy.parameters() + state.networks.prior.parameters()
    assert all(p.grad is None for p in others)


# ---------------------------------------------------------------------------------------------------------------------
# Belief about co-players


def test_histories_are_in_each_co_players_own_order():
    state = make_state("ppo-omg")
    steps = one_step(play(state, 1)[0], 0)
    history = torch.rand(3, 4, 2, 16, generator=seeded(1))
    belief, inference = infer(state, steps, history), state.networks.inference

    def after(*joint):
        joint = torch.tensor(joint).expand(3, 4, 3)
        over = torch.zeros(3, 4, dtype=torch.bool)
        return hop.update_history(state.args, state.games.env, state.networks, belief, joint, history, over)

    one = after(0, 5, 1)
    for other in ((0, 1, 5), (0, 5, 5), (0, 1, 1)):
        assert (one != after(*other)).any(3).all(), "every co-player's history should change"
    features = belief.features.unflatten(1, (4, 2))
    for k, own_order in ((0, [5, 1, 0]), (1, [1, 0, 5])):
        event = inference(features[:, :, k], torch.tensor(own_order).expand(3, 4, 3), method="event")
        now, before = history[:, :, k].chunk(2, 2)
        torch.testing.assert_close(one[:, :, k], torch.cat([now + event, before], 2))


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_histories_add_up_within_a_game_and_fade_between_games(discount):
    """If each step leaves 0.25, and who is gone nothing: of this game the sum, of those before discount * (sum + what
    was left of those before them); in the first entry of both the number of steps"""
    state = make_state("ppo-omg", memory_discount=discount, history_reset_prob=0.0, num_envs=16)
    events = state.networks.inference.params
    events["events.2.weight"].data.zero_()
    events["events.2.bias"].data.fill_(0.25)
    w, _, _ = play(state, 24)
    there = co_players_there(w, TINY_CONFIG)  # [M, T, E, K]
    now, before, games = torch.zeros(3, 16, 2), torch.zeros(3, 16, 2), torch.zeros(3, 16)
    step = torch.tensor([1.0] + [0.25] * 7)

    def expected():
        return torch.cat([now[..., None] * step, before[..., None] * step], 3)

    for t in range(24):
        torch.testing.assert_close(w.history[:, t], expected().bfloat16())
        now = now + there[:, t]
        over = w.done[:, t, :, None]
        now, before = torch.where(over, 0.0, now), torch.where(over, discount * (now + before), before)
        games += w.done[:, t]
    torch.testing.assert_close(state.games.history, expected())
    torch.testing.assert_close(encode(state, w).bfloat16(), w.history)
    assert (games >= 2).all() and not there.all() and (before > 1).any() == (discount > 0)


def test_evidence_is_read_in_units_of_its_noise():
    """Sums over c steps as sum / sqrt(1 + c), of this game and of earlier ones apart; of a stranger nothing"""
    state = make_state("ppo-omg")
    inference, features = state.networks.inference, torch.rand(3, 5, 8, generator=seeded(1))
    history, goal = torch.rand(3, 5, 16, generator=seeded(2)), torch.rand(3, 5, 4, generator=seeded(3))
    history[..., 0], history[..., 8] = 3.0, 99.0
    read = history / torch.tensor([2.0] * 8 + [10.0] * 8)
    for inputs, layers, method in ((features, "head", "forward"), (goal, "decoder", "reconstruct")):
        hidden = torch.cat([inputs, read], 2) @ inference.params[f"{layers}.0.weight"]
        hidden = (hidden + inference.params[f"{layers}.0.bias"][:, None]).relu()
        expected = hidden @ inference.params[f"{layers}.2.weight"] + inference.params[f"{layers}.2.bias"][:, None]
        torch.testing.assert_close(inference(inputs, history, method=method), expected)
        assert not torch.allclose(inference(inputs, history.roll(8, 2), method=method), expected)
    assert not hop.SubgoalInference.read(torch.zeros(2, 3, 16)).any()


def test_some_histories_are_reset_after_a_game_and_only_then():
    """Else a policy never meets strangers in training, and plays badly with them."""
    state, ends, resets = make_state("ppo-omg", num_envs=64, history_reset_prob=0.25), 0, 0
    apart = 0
    for _ in range(14):
        steps = one_step(play(state, 1)[0], 0)
        reset, history = steps.history_reset, state.games.history
        assert not (reset & ~steps.done).any() and (history[reset] == 0).all()
        assert (history[steps.done & ~reset] != 0).any(2).all()
        ends, resets = ends + int(steps.done.sum()), resets + int(reset.sum())
        apart += int((reset[0] != reset[1]).sum())
    assert 0.15 < resets / ends < 0.35 and ends > 200
    assert apart > 10, "learners of one game forget apart"


def test_nothing_is_remembered_of_players_who_are_drawn_anew():
    decay = {}
    for seats, redraw in itertools.product((None, "learner,mixed,mixed"), ("game", "never", "0.5")):
        decay[seats, redraw] = hop.history_decay(make_args(seats=seats, redraw=redraw))
    assert decay.pop(("learner,mixed,mixed", "game")) == 0 and set(decay.values()) == {0.9}
    assert hop.history_decay(make_args("ppo")) == 0


def test_what_later_steps_read_in_a_history_trains_q_phi():
    """Its encoder too, whose features of earlier steps are in the events"""
    state = make_state("ppo-omg")
    histories = encode(state, play(state, 8)[0])
    histories[:, -1].sum().backward()
    params = state.networks.inference.params
    learned = {name for name, p in params.items() if p.grad is not None and p.grad.any()}
    assert learned == {name for name in params if name.startswith(("encoder.", "events."))}


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_histories_along_a_window_are_those_of_the_rollout(discount):
    state = make_state("ppo-omg", memory_discount=discount, num_envs=8, history_reset_prob=0.5)
    play(state, 3)
    w, _, _ = play(state, 12)
    histories = encode(state, w)
    torch.testing.assert_close(histories, w.history.float(), atol=5e-3, rtol=5e-3)  # kept in half precision
    following = one_step(play(state, 1)[0], 0)
    longer = hop.Transitions(*(torch.cat([x, y[:, None]], 1) for x, y in zip(w, following, strict=True)))
    torch.testing.assert_close(encode(state, longer)[:, 12], following.history.float(), atol=5e-3, rtol=5e-3)
    assert w.done[:, :-1].any() and histories.abs().max() > 0.1


def test_divergence_and_samples_of_subgoals():
    q, p = torch.randn(2, 5, 6, generator=seeded(1))
    normal = [torch.distributions.Normal(x[:, :3], (0.5 * x[:, 3:]).exp()) for x in (q, p)]
    expected = torch.distributions.kl_divergence(*normal).sum(1)
    torch.testing.assert_close(hop.goal_kl("continuous", q, p), expected)
    category = [torch.distributions.Categorical(logits=x) for x in (q, p)]
    torch.testing.assert_close(hop.goal_kl("discrete", q, p), torch.distributions.kl_divergence(*category))
    noise = torch.randn(5, 3, generator=seeded(2))
    torch.testing.assert_close(hop.sample_goal("continuous", q, noise), normal[0].mean + noise * normal[0].stddev)
    assert torch.equal(hop.goal_mean("continuous", q), q[:, :3])
    torch.testing.assert_close(hop.goal_mean("discrete", q), category[0].probs)
    args = make_args(goal_kind="discrete", goal_dim=6)
    torch.manual_seed(1)
    logits = q[:1].expand(20_000, 6).clone().requires_grad_()
    noise = hop.goal_noise(args, 20_000, device=CPU)
    drawn = hop.sample_goal("discrete", logits, noise)
    assert ((drawn - drawn.round()).abs() < 1e-5).all() and torch.allclose(drawn.sum(1), torch.ones(20_000))
    torch.testing.assert_close(
        drawn.mean(0), category[0].probs[0], atol=0.02, rtol=0
    )  # Gumbel noise draws from softmax
    (gradient,) = torch.autograd.grad(drawn[:, 0].sum(), logits)
    soft = ((logits + noise) / 0.5).softmax(1)
    (expected,) = torch.autograd.grad(soft[:, 0].sum(), logits)
    torch.testing.assert_close(gradient, expected)  # straight through, at temperature 0.5
    torch.manual_seed(1)
    drawn = hop.goal_noise(make_args(), 5000, device=CPU)
    assert drawn.shape == (5000, 4) and abs(float(drawn.mean())) < 0.03 and abs(float(drawn.std()) - 1) < 0.03


# ---------------------------------------------------------------------------------------------------------------------
# Model losses


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
    return torch.tensor(done), torch.tensor(present), number


@pytest.mark.parametrize("selection", ["conservative", "optimistic", "final"])
def test_hindsight_subgoals_by_brute_force(selection):
    m, steps, games, k, d = 2, 9, 5, 2, 4
    args = make_args(subgoal_horizon=3)
    done, present, number = random_games(m, steps, games, k, seed=1)
    generator = seeded(2)
    goals, prior = torch.randn(m, steps, games, k, d, generator=generator), torch.randn(m, steps, games, k, 2 * d)
    env = StagHuntEnv(TINY_CONFIG, m * steps * games, seed=3)
    board = env.cells(env.state)[:, 0].unflatten(0, (m, steps, games))
    walls = torch.zeros(m, steps, games, 1, dtype=torch.uint8)
    time, joint = torch.randint(6, (2, m, steps, games), generator=generator).byte()
    joint = joint[..., None].expand(-1, -1, -1, 3)
    fields = dict.fromkeys(hop.Transitions._fields, done)
    fields |= {"board": board, "walls": walls, "time": time, "last_joint": joint}
    windows = hop.Transitions(**fields)
    policy = hop.Stacked(lambda: hop.ActorCritic(TINY_CONFIG, args), [1, 2], CPU)
    with torch.no_grad():
        ours = hop.hindsight_goals(
            args, env, hop.Networks(policy), selection, windows, goals, prior, present, windows.done
        )
    chosen_ahead = 0
    for i, t, g, j in np.ndindex(m, steps, games, k):
        same = [u for u in range(steps) if number[i, u, g] == number[i, t, g] and present[i, u, g, j]]
        later = [u for u in same if t < u <= t + 3]
        expected = t
        if selection == "final":
            expected = max([t, *(u for u in same if u >= t)])
        elif later:
            tried = goals[i, t, g].repeat(len(later), 1, 1)
            tried[:, j] = prior[i, later, g, j, :d]
            fields = (board[i, t, g], walls[i, t, g], time[i, t, g] / 6, joint[i, t, g])
            cells, no_walls, *rest = (x.expand(2, len(later), *x.shape) for x in fields)
            seen = hop.entity_views(env, cells, no_walls)
            with torch.no_grad():
                *_, value = hop.evaluate_policy(args, policy, seen, *rest, tried.flatten(1).expand(2, -1, -1))
            value = value[i].tolist()
            expected = later[value.index((min if selection == "conservative" else max)(value))]
        assert torch.equal(ours[i, t, g, j], prior[i, expected, g, j]), (i, t, g, j)
        chosen_ahead += expected > t + 1
    assert chosen_ahead > 10


@pytest.mark.parametrize("pushed", [1, 2, 3, 5])
def test_windows_of_two_rollouts_are_one_after_the_other(pushed):
    """Where none follows yet, nothing that comes there belongs to the same game"""
    replay = hop.Replay(3, CPU)
    for rollout in numbered(pushed):
        replay.push(rollout)
    windows = replay.sample(200, 2)
    value, last = windows.reward.int(), windows.done[:, 7]  # [M, 16, 200], [M, 200]
    assert (value[:, :8] - value[:, :1] == 10 * torch.arange(8).view(1, 8, 1)).all() and value.shape == (3, 16, 200)
    follows = value[:, 8] - value[:, 0] == 1000
    assert torch.equal(last, ~follows) and torch.equal(last, value[:, 0] // 1000 == pushed - 1)
    assert not windows.done[:, :7].any() and not windows.done[:, 8:].any() and (pushed == 1 or follows.any())


def test_a_game_that_outlasts_the_rollout_counts_as_it_ends():
    """Losses of 7 steps with the 7 that follow are those of a rollout that was cut after 14."""
    state = make_state("ppo-omg", num_envs=32, subgoal_selection="final")
    parts = state.args, state.games.env, state.networks
    w, _, _ = play(state, 14)
    cut = hop.Transitions(*(x[:, :7] for x in w))
    torch.manual_seed(5)
    ahead = hop.opponent_model_losses(*parts, w, 0.0, False, 7)
    without = model_losses(state, cut)
    assert (ahead["kl"] != without["kl"]).all()
    assert torch.equal(ahead["moa"], without["moa"]), "MOA learns from the 7 steps alone"
    ended = cut._replace(done=cut.done.index_fill(1, torch.tensor([6]), True))
    follows = hop.Transitions(*(torch.cat([x, y[:, 7:]], 1) for x, y in zip(ended, w, strict=True)))
    torch.manual_seed(5)
    other_games = hop.opponent_model_losses(*parts, follows, 0.0, False, 7)
    torch.testing.assert_close(other_games["kl"], without["kl"])


def test_training_looks_into_the_next_rollout(monkeypatch):
    """For subgoals; what is learned from is one rollout"""
    state, looked_at, hindsight_goals = make_state("ppo-omg", num_envs=16), [], hop.hindsight_goals
    for _ in range(2):
        state.games.replay.push(play(state, state.args.num_steps)[0])

    def look(args, env, networks, selection, windows, goals, prior, present, done):
        looked_at.append((goals.shape[1], present.shape[1], done))
        return hindsight_goals(args, env, networks, selection, windows, goals, prior, present, done)

    monkeypatch.setattr(hop, "hindsight_goals", look)
    models = state.games.env, state.networks, state.optimizers["opponents"], state.games.replay
    hop.train_opponent_models(state.args, *models, None, torch.tensor(0.0), 3)
    steps = state.args.num_steps
    assert [sizes[:2] for sizes in looked_at] == [(steps, 2 * steps)] * 3
    assert any(not done[:, steps - 1].all() for *_, done in looked_at), "some games go on"


def test_rule_based_games_are_new_and_seen_with_the_present_networks():
    """Models that see the same few games again and again learn them by heart."""
    state, boards = make_state("ppo-omg", num_envs=16, history_reset_prob=0.0), []
    watched = state.watched
    assert watched.env.num_envs == 8 and (watched.seats.kinds >= 0).all(), "nobody of them learns"
    for number in range(3):
        before = watched.history.bfloat16()
        state.networks.inference.params["events.2.bias"].data += 1
        hop.watch_rule_based(state)
        slot = number % state.args.replay_rollouts
        assert watched.replay.pushed == number + 1
        newest = hop.Transitions(*(x[slot] for x in watched.replay.data))
        torch.testing.assert_close(newest.history[:, 0], before)
        boards.append(newest.board.clone())
        following = one_step(hop.rollout(state.args, watched, state.networks, 1)[0], 0)  # as the networks see it now
        windows = newest._replace(history=newest.history.expand(-1, state.args.num_steps, -1, -1, -1))
        longer = hop.Transitions(*(torch.cat([x, y[:, None]], 1) for x, y in zip(windows, following, strict=True)))
        after = encode(state, longer)[:, -1]
        torch.testing.assert_close(following.history.float(), after, atol=0.2, rtol=0.02)
    assert all((a != b).any() for a, b in itertools.combinations(boards, 2))


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_watched_players_stay_if_they_are_remembered(discount):
    """Else a history would be of somebody else; but in --unsteady places nobody stays"""
    state = make_state("ppo-omg", memory_discount=discount, num_envs=32)
    pretraining = make_watched("ppo-omg", memory_discount=discount, num_envs=16)
    for args, games, networks in (
        (state.args, state.watched, state.networks),
        (pretraining.args, pretraining.games, pretraining.networks),
    ):
        first, changed = games.seats.kinds.clone(), torch.zeros_like(games.seats.kinds, dtype=torch.bool)
        done = []
        for _ in range(2):
            transitions, _, _ = hop.rollout(args, games, networks, args.num_steps)
            done.append(transitions.done)
            changed |= games.seats.kinds != first
        assert torch.cat(done, 1).any(1).all(), "every game ended"
        number = torch.arange(len(changed)) % games.seats.num_envs
        may_change = number < 0.5 * games.seats.num_envs  # in each block the first
        if discount == 0:
            may_change[:] = True
        assert not changed[~may_change].any() and changed[may_change].float().mean() > 0.5


def test_watched_games_have_teams_and_those_of_the_pretraining_have_not():
    """Every second watched game: players of one kind, and one that plays at random (tests/test_seats.py)"""
    state = make_state("hopplus", num_envs=96)
    pretraining = make_watched("hopplus", num_envs=48)
    of_one_kind = {}
    for name, seats in (("watched", state.watched.seats), ("pretraining", pretraining.games.seats)):
        number = torch.arange(len(seats.kinds)) % seats.num_envs
        onlooker = torch.nn.functional.one_hot(number // 2 % seats.kinds.shape[1], seats.kinds.shape[1]).bool()
        team = seats.kinds.masked_fill(onlooker, -1)
        alike = (team == team.amax(1, keepdim=True)) | onlooker
        of_one_kind[name] = alike.all(1)[number % 2 == 1].float().mean().item()
    assert of_one_kind["watched"] == 1 and of_one_kind["pretraining"] < 0.8


@pytest.mark.parametrize("method", ["ppo", "ppo-omg"])
def test_co_players_change_in_unsteady_places_only_where_somebody_remembers_them(method):
    state = make_state(method, seats="learner,mixed,mixed", redraw="never", unsteady=1.0, num_envs=32)
    first = state.games.seats.kinds.clone()
    changed = torch.zeros_like(first, dtype=torch.bool)
    for _ in range(2):
        hop.rollout(state.args, state.games, state.networks, state.args.num_steps)
        changed |= state.games.seats.kinds != first
    assert changed.any().item() == (method == "ppo-omg")


def model_losses(state, windows, eps=0.0, **changes):
    args = dataclasses.replace(state.args, **changes)
    torch.manual_seed(5)
    return hop.opponent_model_losses(args, state.games.env, state.networks, windows, eps)


@pytest.mark.parametrize("subgoals", ["inferred", "actions"])
def test_moa_learns_what_co_players_did_while_they_were_there(subgoals, monkeypatch):
    """The loss against a plain sum: the action taken in s_t, by co-players on the board, each of their games alike"""
    monkeypatch.setattr(hop, "goal_noise", lambda args, *shape, device: torch.zeros(*shape, args.goal_dim))
    state = make_state("ppo-omg", subgoals=subgoals, num_envs=16)
    w, _, _ = play(state, 14)
    enlarge_moa(state)
    first_layer = state.networks.moa.params["head.0.weight"].data
    first_layer[:, -state.args.goal_dim :] = 0  # which subgoal it reads: no matter
    losses = model_losses(state, w)["moa"].tolist()
    gone, there = 0, co_players_there(w, TINY_CONFIG)
    with torch.no_grad():
        histories = encode(state, w)
    for m in range(3):
        games, nll_sum, nll = 0, 0.0, np.zeros((14, 16, 2))
        for t in range(14):
            steps = one_step(w, t)
            belief = infer(state, steps, histories[:, t])
            noise = torch.zeros(3, 32, 4)
            with torch.no_grad():
                log_probs = hop.predict_actions(state.args, state.networks, belief, steps.time / 6, noise)
            for e, k in np.ndindex(16, 2):
                nll[t, e, k] = -log_probs[m, e, k, int(steps.joint[m, e, 1 + k])]
        for e, k in np.ndindex(16, 2):
            first = 0
            for t in range(14):
                if not w.done[m, t, e] and t < 13:
                    continue
                steps = [u for u in range(first, t + 1) if there[m, u, e, k]]
                gone += t + 1 - first - len(steps)
                if steps:
                    games, nll_sum = games + 1, nll_sum + nll[steps, e, k].mean()
                first = t + 1
        assert losses[m] == pytest.approx(nll_sum / games, rel=1e-4)
    assert gone > 20


def test_moa_reads_subgoals_of_the_same_game_now_or_earlier(monkeypatch):
    """Never of a later step, another game or another co-player"""
    read, inferred, kl = [], [], hop.goal_kl
    state = make_state("ppo-omg", num_envs=64)
    w, _, _ = play(state, 14)
    moa = state.networks.moa
    monkeypatch.setattr(hop, "goal_kl", lambda kind, q, p: (inferred.append(q), kl(kind, q, p))[1])
    monkeypatch.setattr(hop, "goal_noise", lambda args, *shape, device: torch.zeros(*shape, args.goal_dim))
    state.networks = state.networks._replace(moa=lambda *x: (read.append(x[3]), moa(*x))[1])
    model_losses(state, w, torch.tensor(0.0))
    goals = hop.goal_mean("continuous", inferred[-1]).view(3, 14, 64, 2, -1)
    equal = (read[-1].view(3, 14, 1, 64, 2, -1) - goals[:, None]).abs().amax(5) < 1e-6  # [M, t, u, G, K]
    clock = torch.arange(14)
    allowed = hop.same_game(w.done) & (clock <= clock[:, None])[..., None, None]
    assert (equal & allowed).any(2).all()
    ages = allowed.sum(2) - 1  # [M, T, G, 1]
    for age in (1, 2, 3):
        own = equal[:, clock, clock][(ages == age).expand(3, 14, 64, 2)].float().mean()
        assert own == pytest.approx(0.5 + 0.5 / (age + 1), abs=0.06)


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
@pytest.mark.parametrize(("reader", "speaker"), [("moa", "inference"), ("moa_prior", "prior")])
def test_subgoals_are_shaped_by_the_actions_that_they_tell(reader, speaker, goal_kind):
    """A MOA's cross-entropy moves the network that names the subgoal: another MOA moves it elsewhere"""
    state = make_state("ppo-omg", goal_kind=goal_kind, num_envs=16)
    add_moa_prior(state)
    w, _, _ = play(state, 8)
    head = [p for name, p in getattr(state.networks, speaker).params.items() if name.startswith("head.")]
    gradients = []
    for factor in (0.0, 100.0):
        getattr(state.networks, reader).params["head.4.weight"].data.mul_(1 + factor)
        torch.manual_seed(5)
        given = state.args, state.games.env, state.networks, w, 0.0
        loss = hop.opponent_model_losses(*given, pretraining=True)["loss"]
        gradients.append(torch.autograd.grad(loss.sum(), head))
    assert all((one != other).flatten(1).any(1).all() for one, other in zip(*gradients, strict=True))


def test_hindsight_is_what_moa_reads_in_a_share_of_its_training(monkeypatch):
    read, compared, kl = [], [], hop.goal_kl
    state = make_state("ppo-omg", num_envs=16)
    w, _, _ = play(state, 8)
    moa, hindsight = state.networks.moa, torch.full((3, 8, 16, 2, 8), 7.0)
    monkeypatch.setattr(hop, "hindsight_goals", lambda *_: hindsight)
    monkeypatch.setattr(hop, "goal_kl", lambda kind, q, p: (compared.append((q, p)), kl(kind, q, p))[1])
    state.networks = state.networks._replace(moa=lambda *x: (read.append(x[3]), moa(*x))[1])
    for eps in (0.0, 0.3, 1.0):
        losses = model_losses(state, w, torch.tensor(eps))
        share = (read[-1] == 7).all(2).float().mean()
        assert share == pytest.approx(eps, abs=0.0 if eps in (0, 1) else 0.06)
        expected = losses["moa"] + losses["recon"] + state.args.kl_coef * losses["kl"]
        torch.testing.assert_close(losses["loss"], expected)
        q, p = compared[-1]
        assert (p == 7).all() and q.requires_grad and not p.requires_grad, "KL(q_phi || f_psi(s^g)), f_psi stays"


def mean_over_games(w, values):
    """values [M, T, G, K] of steps -> [M], in plain Python: over the steps with the co-player on the board, then
    over its games"""
    found, there = [], co_players_there(w, TINY_CONFIG)
    for m in range(len(values)):
        means = []
        for e, k in np.ndindex(values.shape[2:]):
            steps = []
            for t in range(values.shape[1]):
                if there[m, t, e, k]:
                    steps.append(float(values[m, t, e, k]))
                if steps and (w.done[m, t, e] or t == values.shape[1] - 1):
                    means.append(np.mean(steps))
                    steps = []
        found.append(np.mean(means))
    return found


def test_reconstruction_and_divergence_are_those_of_steps_with_the_co_player(monkeypatch):
    """Each against a plain sum: s_t as the co-player sees it; f_psi of the last state before it left"""
    monkeypatch.setattr(hop, "goal_noise", lambda args, *shape, device: torch.zeros(*shape, args.goal_dim))
    state = make_state("ppo-omg", num_envs=16)
    networks = state.networks
    w, _, _ = play(state, 14)
    losses = model_losses(state, w, subgoal_selection="final")
    recon, kl = torch.zeros(2, 3, 14, 16, 2)
    there = co_players_there(w, TINY_CONFIG)
    with torch.no_grad():
        histories = encode(state, w)
        steps = [one_step(w, t) for t in range(14)]
        beliefs = [infer(state, x, histories[:, t]) for t, x in enumerate(steps)]
        prior = torch.stack([networks.prior(x.board, x.walls).unflatten(1, (16, 2)) for x in beliefs], 1)
        for t, belief in enumerate(beliefs):
            goal = hop.goal_mean("continuous", belief.params)
            logits = networks.inference(goal, histories[:, t].flatten(1, 2), method="reconstruct")
            board = planes(TINY_CONFIG, w.board[:, t], w.walls[:, t])
            in_own_order = [board[:, :, [1, 2, 0, 3, 4, 5]], board[:, :, [2, 0, 1, 3, 4, 5]]]
            target = torch.stack(in_own_order, 2).flatten(1, 2).flatten(2).float()
            error = nn.functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
            recon[:, t] = error.mean(2).unflatten(1, (16, 2))
            final = torch.zeros_like(prior[:, 0])
            for m, e, k in np.ndindex(3, 16, 2):
                last = t
                while last < 13 and not w.done[m, last, e] and there[m, last + 1, e, k]:
                    last += 1
                final[m, e, k] = prior[m, last, e, k]
            kl[:, t] = hop.goal_kl("continuous", belief.params.unflatten(1, (16, 2)), final)
    assert losses["recon"].tolist() == pytest.approx(mean_over_games(w, recon), rel=1e-4)
    assert losses["kl"].tolist() == pytest.approx(mean_over_games(w, kl), rel=1e-4)
    losses["recon"].sum().backward()
    grads = [p.grad for p in networks.inference.parameters()]
    assert all(grad is not None and grad.any() for grad in grads), "what is inferred is what reconstructs"


def test_in_pretraining_a_second_moa_reads_what_f_psi_says_of_the_present(monkeypatch):
    monkeypatch.setattr(hop, "goal_noise", lambda args, *shape, device: torch.zeros(*shape, args.goal_dim))
    state = make_state("ppo-omg", num_envs=16)
    add_moa_prior(state)
    w, _, _ = play(state, 14)
    (moa_prior,) = watch_networks(state, "moa_prior")
    hop.opponent_model_losses(state.args, state.games.env, state.networks, w, 0.0, pretraining=True)
    ((_, (entities, walls, _, goals, _)),) = moa_prior.given
    torch.testing.assert_close(goals, hop.goal_mean("continuous", state.networks.prior(entities, walls)))


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_in_pretraining_f_psi_is_kept_near_a_standard_normal(goal_kind):
    """Where f_psi says the same of every state, its KL is known; in training there is none."""
    state, losses = make_state("ppo-omg", goal_kind=goal_kind, num_envs=16), {}
    add_moa_prior(state)
    w, _, _ = play(state, 14)
    said = torch.randn_like(state.networks.prior.params["head.bias"])  # [M, parameters]
    state.networks.prior.params["head.weight"].data.zero_()
    state.networks.prior.params["head.bias"].data.copy_(said)
    for pretraining, kl_coef in itertools.product((False, True), (0.0, 0.5)):
        args = dataclasses.replace(state.args, kl_coef=kl_coef)
        torch.manual_seed(5)
        given = args, state.games.env, state.networks, w, 0.0, pretraining
        losses[pretraining, kl_coef] = hop.opponent_model_losses(*given)
    if goal_kind == "continuous":
        q = torch.distributions.Normal(said[:, :4], (0.5 * said[:, 4:]).exp())
        vae_kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(1)
    else:
        q = torch.distributions.Categorical(logits=said)
        vae_kl = torch.distributions.kl_divergence(q, torch.distributions.Categorical(logits=torch.zeros(3, 4)))
    assert (vae_kl > 0.01).all()
    for pretraining in (False, True):
        without, with_kl = losses[pretraining, 0.0], losses[pretraining, 0.5]
        expected = without["loss"] + 0.5 * (without["kl"] + pretraining * vae_kl)
        torch.testing.assert_close(with_kl["loss"], expected)


def test_training_selects_subgoals_as_asked_and_pretraining_the_last_state():
    """Under V the candidates have another order than under -V: what is lowest for one is highest for the other."""
    state, kl = make_state("ppo-omg", num_envs=16), {}
    add_moa_prior(state)
    w, _, _ = play(state, 14)
    selections = "conservative", "optimistic", "final"
    for sign in (1, -1):
        for selection in selections:
            kl[selection, sign] = model_losses(state, w, subgoal_selection=selection)["kl"].tolist()
        for name in ("critic.weight", "critic.bias"):
            state.networks.policy.params[name].data.neg_()
    for one, other in itertools.combinations(selections, 2):
        assert kl[one, 1] != kl[other, 1], f"{one} and {other}"
    assert kl["conservative", 1] == kl["optimistic", -1] and kl["conservative", -1] == kl["optimistic", 1]
    assert kl["final", 1] == kl["final", -1]
    for selection in selections:
        args = dataclasses.replace(state.args, subgoal_selection=selection)
        torch.manual_seed(5)
        losses = hop.opponent_model_losses(args, state.games.env, state.networks, w, 0.0, pretraining=True)
        assert losses["kl"].tolist() == kl["final", 1]


@pytest.mark.parametrize("ratio", [0.25, 0.75, 1.0])
def test_both_models_learn_from_their_share_of_rule_based_games(ratio):
    state = make_state(offline_ratio=ratio, num_envs=16)
    rule_based, _, _ = play(state, state.args.num_steps)
    marked = rule_based._replace(time=rule_based.time + 100, reward=rule_based.reward + 1000)
    for _ in range(state.args.replay_rollouts):
        state.watched.replay.push(marked)
    moa, world = watch_networks(state, "moa", "world")
    train(state)
    clocks = [inputs[2] for _, inputs in moa.given]
    rewards = [inputs[4] for method, inputs in world.given if method == "loss"]
    assert len(clocks) == state.args.subgoal_updates and len(rewards) == state.args.wm_updates
    for clock, reward in zip(clocks, rewards, strict=True):
        assert (clock > 10).float().mean(1).tolist() == [ratio] * 3
        assert (reward > 900).float().mean(1).tolist() == [ratio] * 3


def test_every_learner_trains_on_what_it_saw_and_nobody_is_left_out():
    """One iteration changes all networks of all learners; what one of them saw changes only its own."""
    results = []
    for changed in (False, True):
        state = make_state(num_seeds=2, offline_ratio=0.0)
        before = copy.deepcopy(state.state_dict())["networks"]
        push = state.games.replay.push

        def push_changed(w, push=push, changed=changed):
            w.reward[2] += changed  # of one learner, 10 is a payoff too
            w.joint[2, ..., 1:] = STAY if changed else w.joint[2, ..., 1:]
            push(w)

        state.games.replay.push = push_changed
        train(state)
        results.append(copy.deepcopy(state.state_dict())["networks"])
        for name in ("policy", "inference", "moa", "world"):
            pairs = zip(results[-1][name].values(), before[name].values(), strict=True)
            moved = torch.stack([(new != old).flatten(1).any(1) for new, old in pairs])  # [parameter, learner]
            assert moved.shape[1] == 6 and moved.any(0).all(), name
        assert same_tree(results[-1]["prior"], before["prior"]), "f_psi is frozen"
    others = [0, 1, 3, 4, 5]
    for name in ("inference", "moa", "policy"):
        for x, y in zip(results[0][name].values(), results[1][name].values(), strict=True):
            assert torch.equal(x[others], y[others]), name
    for name in ("moa", "world"):
        assert not same_tree(*({k: x[2] for k, x in result[name].items()} for result in results)), name


def numbered(rollouts=1, m=3, steps=8, games=4, first=0):
    """Transitions whose reward is 1000 * rollout + 100 * learner + 10 * step + game"""
    found = []
    for r in range(first, first + rollouts):
        axes = torch.meshgrid(*(torch.arange(n) for n in (m, steps, games)), indexing="ij")
        value = 1000 * r + 100 * axes[0] + 10 * axes[1] + axes[2]
        fields = dict.fromkeys(hop.Transitions._fields, value.float())
        found.append(hop.Transitions(**fields | {"done": value < 0}))
    return found


def test_the_replay_keeps_the_last_rollouts_and_gives_each_learner_its_own():
    replay = hop.Replay(2, CPU)
    for count, rollout in enumerate(numbered(5), 1):
        replay.push(rollout)
        torch.manual_seed(1)
        found = replay.sample(400, 0).reward
        assert found.shape == (3, 400)
        assert len((found % 100).unique(dim=0)) == len(found), "each draws for itself"
        for row, values in enumerate(found.int().tolist()):
            assert {v // 100 % 10 for v in values} == {row}
            assert {v // 1000 for v in values} == set(range(max(0, count - 2), count))
            assert {v % 100 for v in values} == {10 * t + e for t in range(8) for e in range(4)}
        windows = replay.sample(50, True).reward.int()
        assert windows.shape == (3, 8, 50)
        assert (windows[:, :, :] - windows[:, :1] == 10 * torch.arange(8).view(1, 8, 1)).all()
        assert (windows // 100 % 10 == torch.arange(3).view(3, 1, 1)).all() and len(windows[0, 0].unique()) > 3
    again = hop.Replay(2, CPU)
    again.load_state_dict(replay.state_dict())
    assert same_tree(again.state_dict(), replay.state_dict()) and same_tree(again.data._asdict(), replay.data._asdict())
    rollout = numbered(first=9)[0]
    again.push(rollout)
    assert not same_tree(again.state_dict(), replay.state_dict()), "what was loaded is a copy"


@pytest.mark.parametrize(
    ("ratio", "count", "old"), [(0.0, 40, 0), (0.25, 40, 10), (1.0, 40, 40), (0.05, 8, 1), (0.5, 2, 1), (0.99, 8, 7)]
)
def test_rule_based_games_make_up_their_share(ratio, count, old):
    """And where both kinds are asked for, both come"""
    replay, offline = hop.Replay(2, CPU), hop.Replay(2, CPU)
    replay.push(numbered()[0])
    offline.push(numbered(first=7)[0])
    for window, dim in ((False, 1), (True, 2)):
        found = hop.sample_replays(replay, offline, ratio, count, window).reward
        assert found.shape[dim] == count and ((found >= 7000).sum(dim) == old).all()
    assert (hop.sample_replays(replay, None, ratio, 40, False).reward < 7000).all()


def test_who_neither_reads_subgoals_nor_imagines_has_no_models():
    state = make_state("ppo")
    assert list(state.networks.present()) == ["policy"] == list(state.optimizers) and state.watched is None
    train(state)
    assert state.games.replay.data is None
    assert not any(name.startswith(("moa/", "omg/", "wm/")) for name in state.metrics.read())
    imagines = make_state(subgoals="none").networks
    assert None not in (imagines.prior, imagines.inference, imagines.moa, imagines.world)


def test_a_history_has_room_for_its_count():
    with pytest.raises(ValueError, match="--subgoal-hidden must be 2 or more"):
        hop.validate(make_args(subgoal_hidden=1))
    hop.validate(make_args(subgoals="none", imagination=False, subgoal_hidden=1))  # there is none


@pytest.mark.parametrize("watch", [False, True])
def test_memory_goes_on_in_unsteady_places(watch):
    """Nobody tells a learner that somebody else has come"""
    seats = {"seats": "learner,mixed,mixed", "redraw": "never"}
    state = make_state("ppo-omg", **seats, unsteady=1.0, history_reset_prob=0.0, num_envs=32)
    games = state.watched if watch else state.games
    first = games.seats.kinds.clone()
    hop.rollout(state.args, games, state.networks, 8)  # all games end
    w, _, _ = hop.rollout(state.args, games, state.networks, 8)
    begun = w.history[w.time == 0]  # [n, K, 2 * hidden]: this game, earlier ones; their first entries count
    seen = begun[..., state.args.subgoal_hidden]
    assert len(begun) > 10 and (seen > 0).all() and not w.history_reset.any()
    assert (games.seats.kinds != first).any()
