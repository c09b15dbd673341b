"""hopplus_ppo.py: imagined games, PPO on real and imagined steps, and what is logged about them"""

import copy
import dataclasses
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import hopplus_ppo as hop
from stag_hunt_env import STAY, seats_table

import numpy as np
import pytest
import torch
from helpers import TINY_CONFIG, seeded
from tiny_hopplus import (
    TrueWorld,
    co_players_there,
    enlarge_moa,
    infer,
    make_args,
    make_state,
    on_board,
    one_step,
    play,
    recorded,
    train,
)
from torch import nn


# ---- Imagination
def wrong(board):
    """Cells that are on the board, but another one for everybody; no walls"""
    wrong = (board + 1) % TINY_CONFIG.num_cells
    wrong[..., -1] = 0
    return wrong


def test_what_the_world_model_learns_is_true():
    """Boards and actions in the same order, payoffs of the same step; of steps without the learner nothing"""
    state = make_state(num_envs=16, offline_ratio=0.0)
    steps, _ = play(state, 14)
    there = on_board(TINY_CONFIG, steps["board"][..., 0])
    state.games.push(steps | {"payoff": torch.where(there, steps["payoff"], 7.0)})
    state.networks["world"] = TrueWorld(state)
    assert (hop.world_model_losses(state)["losses/world_model"] == 0).all() and not there.all()
    assert (steps["payoff"] != 0).any() and (steps["joint"] >= 5).any()


def imagine(state, horizon=99, world=None, rollouts=2):
    """hopplus_ppo.imagine from the next rollouts of the game -> samples [M, h, n, ...]; `steps`: (situations, joint
    actions, next situations) [M, n, ...] of each step; `starts`: the real situations [M, n, ...] that were drawn
    from"""
    for _ in range(rollouts):
        state.games.push(play(state, state.args.num_steps)[0])
    state.horizon.copy_(torch.as_tensor(horizon).expand(len(state.horizon)))
    state.networks["world"] = world or TrueWorld(state)
    found = SimpleNamespace(steps=[], windows=None)
    imagined_step, sample_replays = hop.imagined_step, hop.sample_replays

    def step(state, situation, joint):
        new = imagined_step(state, situation, joint)
        found.steps.append((dict(situation), joint, dict(new)))
        return new

    def draw(*given, **named):
        found.windows = sample_replays(*given, **named)
        return found.windows

    with mock.patch.multiple(hop, imagined_step=step, sample_replays=draw):
        found.samples = hop.imagine(state)
    found.starts = {name: found.windows[name].flatten(1, 2) for name in hop.SITUATION}
    return found


def key(situations, m, row):
    """Situation [m, row] as bytes"""
    return b"".join(situations[name][m, row].double().numpy().tobytes() for name in hop.SITUATION)


@pytest.mark.parametrize("limit", [None, 1])
def test_imagined_games_follow_the_rules_and_begin_anew_where_they_end(limit):
    """At real situations with the learner on the board. What is cut at the measured horizon begins anew one step
    later, which does not count: PPO needs its value. No other step is imagined in vain."""
    config = dataclasses.replace(TINY_CONFIG, steps_after_first_hunt=limit)
    state = make_state(config=config, num_envs=12, offline_ratio=0.0, ppo_real_ratio=0.2)
    horizons = [0, 2, 99]  # of three learners; none, a part, and all of --imagination-horizon
    dream = imagine(state, horizons)
    samples, gone = dream.samples, TINY_CONFIG.num_cells
    there = on_board(TINY_CONFIG, dream.starts["board"][..., 0])
    possible = [{key(dream.starts, m, i) for i in there[m].nonzero()[:, 0].tolist()} for m in range(3)]
    seen = {"clock": 0, "left": 0, "limit": 0, "cut": 0}
    begun = set()
    for m, row in np.ndindex(3, samples["mask"].shape[2]):
        begins, age, board_after, acted = True, 0, None, None
        for k, (now, joint, new) in enumerate(dream.steps):
            sample = {name: x[m, k, row] for name, x in samples.items()}
            if begins:
                begun.add(key(now, m, row))
                assert key(now, m, row) in possible[m]
                first, time = int(now["first_hunt"][m, row]), round(6 * float(now["clock"][m, row]))
            else:
                assert torch.equal(now["board"][m, row], board_after) and torch.equal(now["last_joint"][m, row], acted)
                assert limit is None or now["first_hunt"][m, row] == first
            assert float(sample["clock"]) == float(now["clock"][m, row]) == pytest.approx(time / 6)
            for name in ("board", "last_joint"):
                assert torch.equal(sample[name], now[name][m, row])
            acted, board = joint[m, row], now["board"][m, row]
            assert acted[0] == sample["action"] and sample["legal"][sample["action"]]
            board_after = new["board"][m, row]
            time += 1
            if first < 0 and (board_after != board)[3:].any():
                first = time
            left = bool(board_after[0] == gone)
            limited = limit is not None and 0 <= first <= time - limit
            assert sample["ended"] == (time >= 6 or left or limited)
            assert sample["mask"] == (age < horizons[m])
            if sample["mask"]:
                seen["clock"] += time >= 6
                seen["left"] += left
                seen["limit"] += limited
            seen["cut"] += not sample["mask"]
            begins = bool(sample["ended"] | ~sample["mask"])
            age = 0 if begins else age + 1
    assert all(seen[name] > 3 for name in ("clock", "left", "cut")) and (seen["limit"] > 3) == (limit is not None)
    assert not there.all() and len(begun) > 40, "from everywhere"
    shares = samples["mask"].float().mean((1, 2))
    assert shares[0] == 0 and 0.6 < shares[1] < shares[2] == 1


@pytest.mark.parametrize("goal_kind", ["continuous", "discrete"])
def test_imagined_subgoals_are_inferred_as_real_ones_are(goal_kind):
    """What was imagined is remembered, and everybody does what the imagined board allows"""
    state = make_state(goal_kind=goal_kind, num_envs=8, offline_ratio=0.0)
    enlarge_moa(state)
    dream = imagine(state)
    samples = dream.samples
    never = torch.zeros_like(samples["mask"][:, 0])
    for k, (now, joint, _) in enumerate(dream.steps):
        with torch.no_grad():
            mind = hop.decide(state, infer(state, now))
            following = hop.update_history(state, mind, joint, never)
        legal = torch.cat([mind["legal"][:, :, None], mind["others_legal"].unflatten(1, (-1, 2))], 2)
        assert legal.gather(3, joint.long()[..., None]).all() and not legal.all(3).any()
        torch.testing.assert_close(samples["goals"][:, k], mind["goals"])
        torch.testing.assert_close(samples["value"][:, k], mind["value"])
        own = mind["log_probs"].gather(2, samples["action"][:, k])[..., 0]
        torch.testing.assert_close(samples["log_prob"][:, k], own)
        if k < 3:
            goes_on = ~samples["ended"][:, k]
            history = dream.steps[k + 1][0]["history"]
            torch.testing.assert_close(history[goes_on], following[goes_on])
            assert goes_on.any() and (history != now["history"])[goes_on].any()
    assert (samples["goals"] != 0).any(3).all()


def test_imagined_games_start_with_what_was_remembered_in_their_own_step():
    """The replay keeps the first history of a rollout alone; the others are inferred again"""
    state = make_state(num_envs=12, offline_ratio=0.0)
    play(state, 8)
    steps, _ = play(state, 8)
    state.games.push(steps)
    starts = imagine(state, rollouts=0).windows
    found = 0
    for m, g in np.ndindex(starts["done"].shape[0], starts["done"].shape[2]):
        of_game = [e for e in range(12) if torch.equal(starts["board"][m, :, g], steps["board"][m, :, e])]
        expected = steps["history"][m, :, of_game[0]].float()
        torch.testing.assert_close(starts["history"][m, :, g], expected, atol=0.1, rtol=0.02)  # half precision
        found += int((expected[1:] - expected[:1]).abs().max() > 0.5)
    assert found > 20


def test_imagined_actions_are_drawn_from_the_policy_and_from_moa():
    """Not the likeliest ones. Each co-player has a subgoal of its own, drawn from what q_phi says."""
    flags = {"num_envs": 1, "num_steps": 1, "replay_rollouts": 1, "imagination_horizon": 1, "offline_ratio": 0.0}
    state = make_state(**flags, ppo_real_ratio=1 / 4001)  # 4000 rollouts of each learner, from one situation
    enlarge_moa(state)
    state.networks["inference"].params["head.2.bias"].data[..., state.args.goal_dim :] = 3.0  # it is far from certain
    state.networks["policy"].params["actor.weight"].data.mul_(100.0)
    ((now, joint, _),) = imagine(state, rollouts=1).steps
    assert joint.shape == (3, 4000, 3)
    mind = infer(state, now)
    torch.manual_seed(1)
    noise = hop.goal_noise(state.args, mind["posterior"])
    with torch.no_grad():
        log_probs = hop.decide(state, mind)["log_probs"]
        drawn, of_mean = (hop.predict_actions(state, mind, x) for x in (noise, torch.zeros_like(noise)))
    expected = drawn.mean(1)  # [M, K, 7]
    likeliest = nn.functional.one_hot(drawn.argmax(3), 7).float().mean(1)
    for other in (of_mean[:, 0], likeliest):
        assert ((expected - other).abs().amax((1, 2)) > 0.1).all(), "which subgoal it is matters, and who draws"
    found = nn.functional.one_hot(joint.long(), 7).float()
    torch.testing.assert_close(found[:, :, 1:].mean(1), expected, atol=0.03, rtol=0)
    torch.testing.assert_close(found[:, :, 0].mean(1), log_probs[:, 0].exp(), atol=0.03, rtol=0)
    both = torch.einsum("mna,mnb->mab", found[:, :, 1], found[:, :, 2]) / 4000
    independent = expected[:, 0, :, None] * expected[:, 1, None]
    torch.testing.assert_close(both, independent, atol=0.03, rtol=0)


@pytest.mark.parametrize(("share", "real_ratio"), [(0.0, 0.1), (0.75, 0.1), (1.0, 0.1), (0.3, 0.95)])
def test_a_share_of_the_imagined_games_starts_from_rule_based_ones(share, real_ratio):
    """In the last case there are two of them, of which each kind gets one"""
    state = make_state(watched_starts=share, num_envs=16, ppo_real_ratio=real_ratio, num_steps=4)
    steps, _ = play(state, 4, games=state.watched)
    state.watched.push(steps | {"clock": steps["clock"] + 100})
    dream = imagine(state)
    few = dream.windows["clock"].shape[2] == 2
    expected = 0.5 if few else share
    assert few == (share == 0.3)
    assert (dream.windows["clock"] >= 100).float().mean((1, 2)).tolist() == pytest.approx([expected] * 3)
    there = on_board(TINY_CONFIG, dream.starts["board"][..., 0])
    expected = ((dream.starts["clock"] >= 100) & there).sum(1) / there.sum(1)
    begun = dream.samples["clock"][:, 0] >= 100
    assert few or (begun.float().mean(1) - expected).abs().max() < 0.1


def test_the_horizon_is_measured_by_boards_and_payoffs():
    state = make_state(num_envs=32, trust_exact_match=0.9)
    state.env.state.time[::4] = 4  # a quarter of the games end on the way
    steps, _ = play(state, 8)

    def measured(change=lambda board, payoff, call: (board, payoff)):
        state.networks["world"] = TrueWorld(state, change)
        metrics = hop.measure_horizon(state, steps)
        return state.horizon.tolist(), {name.removeprefix("wm/"): x.tolist() for name, x in metrics.items()}

    def wrong_in_the_third_step(board, payoff, call):  # what was wrong once counts as wrong
        return {2: wrong(board), 3: steps["next_board"][:, 3]}.get(call, board), payoff

    def without_prey(board, payoff, call):
        board[:, :, 3:-1] = TINY_CONFIG.num_cells
        return board, payoff

    def wrong_where_games_end(board, payoff, call):
        board[:, ::4] = wrong(board[:, ::4])
        return board, payoff

    horizon, metrics = measured()
    assert horizon == [4, 4, 4] and metrics["horizon"] == horizon and metrics["unknown_reward"] == [0, 0, 0]
    for k in range(1, 5):
        assert metrics[f"exact_match/{k}"] == metrics[f"payoff_match/{k}"] == [1, 1, 1]
    horizon, metrics = measured(wrong_in_the_third_step)
    assert horizon == [2, 2, 2] and metrics["exact_match/2"] == [1, 1, 1] and metrics["exact_match/3"] == [0, 0, 0]
    assert metrics["payoff_match/3"] == [1, 1, 1] and metrics["exact_match/4"] == [0, 0, 0]
    horizon, metrics = measured(without_prey)  # from its own boards on, where nobody earns anything
    done, earned = steps["done"][:, :4], steps["payoff"][:, :4] != 0
    counts = on_board(TINY_CONFIG, steps["board"][:, :4, :, 0]) & (done.cumsum(1) - done.int() == 0)
    right = (~earned | (torch.arange(4) == 0)[:, None]).int().cumprod(1)
    shares = (right * counts).sum(2) / counts.sum(2)  # [M, 4]
    for k in range(4):
        assert metrics[f"payoff_match/{k + 1}"] == pytest.approx(shares[:, k].tolist()), k
    assert horizon == [0, 0, 0] and (shares[:, 0] == 1).all() and (shares[:, 3] < 1).any()
    horizon, metrics = measured(lambda board, payoff, call: (board, payoff + 5))
    assert horizon == [0, 0, 0] and metrics["exact_match/4"] == [1, 1, 1] and metrics["payoff_match/1"] == [0, 0, 0]
    horizon, metrics = measured(wrong_where_games_end)
    assert max(metrics["exact_match/1"]) < 0.9 and metrics["exact_match/4"] == [1, 1, 1]
    assert horizon == [0, 0, 0], "who is right later was not trusted before"
    steps["payoff"][1, 0, 0] = 7.0  # somebody pays a bonus inside the game, whose highest payoff is 5
    assert measured()[1]["unknown_reward"] == [0, 2, 0]


def test_the_horizon_is_measured_before_the_world_model_learns_from_the_same_steps():
    found = []
    for updates in (0, 8):
        _, metrics = train(make_state(wm_updates=updates, wm_learning_rate=0.05, trust_exact_match=0.5))
        found.append({name: x.tolist() for name, x in metrics.items() if name.startswith("wm/")})
    assert found[0] == found[1] and "wm/exact_match/1" in found[0]


def test_the_horizon_is_measured_on_games_of_all_places():
    """Of more than 1024 not the first ones: with shared parameters, those are of the first seats"""
    state = make_state()
    steps, _ = play(state, 4)
    many = {name: x.repeat_interleave(512, 2) for name, x in steps.items()}  # 2048 games
    many["next_board"][:, :, 1024:] = wrong(many["next_board"][:, :, 1024:])
    state.networks["world"] = TrueWorld(state)
    assert hop.measure_horizon(state, many)["wm/exact_match/1"].tolist() == [0.5] * 3


def test_where_a_learner_was_never_on_the_board_it_imagines_nothing_and_its_horizon_stays():
    state = make_state(offline_ratio=0.0)
    steps, _ = play(state, 8)
    steps["board"][0, ..., 0] = TINY_CONFIG.num_cells
    state.games.push(steps)
    mask = imagine(state, rollouts=0).samples["mask"]
    assert not mask[0].any() and mask[1:].all()
    state.horizon.fill_(2)
    metrics = hop.measure_horizon(state, steps)
    assert state.horizon.tolist() == [2, 4, 4]
    assert metrics["wm/exact_match/1"].isfinite().tolist() == [False, True, True], "measured of two"


def test_a_bonus_in_shape_reward_reaches_real_and_imagined_steps(monkeypatch):
    """It may read what the learner perceived. What is judged and what the world model learns is the payoff."""

    def bonus(state, payoff, mind, joint, next_board):
        surprise = mind["posterior"][:, ::2, 0].abs()  # of the first co-player
        stays = 0.25 * (joint[..., 0] == STAY) + (mind["board"][..., 0] == 0)
        return payoff + surprise + stays + 9.0 * (next_board[..., 1] == 2)

    monkeypatch.setattr(hop, "shape_reward", bonus)
    state = make_state(num_envs=12, offline_ratio=0.0)
    steps, sums = play(state, 8)
    for t in range(8):
        now = one_step(steps, t)
        reward = bonus(state, now["payoff"], infer(state, now), now["joint"], now["next_board"])
        torch.testing.assert_close(now["reward"], reward, atol=2e-2, rtol=2e-2)  # half precision
    payoffs = {0.0, 1.0, 0.5, 5.0, *(np.float32(x / 3).item() for x in (1, 10))}
    assert set(steps["payoff"].unique().tolist()) <= payoffs and sums["games/return"].max() <= 12 * 10
    dream = imagine(state)
    for k, (now, joint, new) in enumerate(dream.steps):
        reward = bonus(state, new["payoff"], infer(state, now), joint, new["board"])
        torch.testing.assert_close(dream.samples["reward"][:, k], reward)
        assert torch.equal(dream.samples["payoff"][:, k], new["payoff"])


# ---- PPO
def some_steps(args, m=2, steps=12, games=8, seed=1):
    """Random samples [M, T, E, ...] as of a rollout, a few of which do not count"""
    generator = seeded(seed)

    def numbers(*shape):
        return torch.randn(m, steps, games, *shape, generator=generator)

    config = args.config
    cells = torch.randint(config.num_cells + 1, (m, steps, games, 7), generator=generator)
    cells[..., -1] = 0  # no walls
    legal = numbers(7) < 0.5
    legal[..., STAY] = True
    found = {
        "board": cells.byte(),
        "clock": numbers(),
        "last_joint": torch.randint(7, (m, steps, games, 3), generator=generator).byte(),
        "goals": numbers(2 * args.goal_size),
        "legal": legal,
        "action": torch.where(legal, numbers(7), -math.inf).argmax(3, keepdim=True),
        "reward": numbers(),
        "payoff": numbers(),
        "ended": numbers() < -1,
        "mask": numbers() < 1,
        "log_probs": torch.zeros_like(numbers(7)),
    }
    return found | {"log_prob": numbers() - 2, "value": torch.randn(m, steps + 1, games, generator=generator)}


@pytest.mark.parametrize("gae_lambda", [0.8, 1.0])
def test_advantages_against_plain_python(gae_lambda):
    args = make_args(gamma=0.9, gae_lambda=gae_lambda)
    given = some_steps(args)
    given["reward"] = given["reward"].masked_fill(~given["mask"], math.nan)  # of who has left
    batch, _ = hop.make_ppo_batch(args, given, real=True)
    ours = batch["advantage"].unflatten(1, (12, 8))
    assert torch.equal(batch["returns"], batch["advantage"] + batch["value"])
    reward, value, ended, mask = (given[name].double().numpy() for name in ("reward", "value", "ended", "mask"))
    cuts = 0
    for i, t, g in np.ndindex(2, 12, 8):
        expected, monte_carlo, factor = 0.0, 0.0, 1.0
        for u in range(t, 12 if mask[i, t, g] else t):
            ahead = 0.0 if ended[i, u, g] else value[i, u + 1, g]
            expected += (gae_lambda * 0.9) ** (u - t) * (reward[i, u, g] + 0.9 * ahead - value[i, u, g])
            monte_carlo += factor * reward[i, u, g]
            factor *= 0.9
            last = u == 11 or not mask[i, u + 1, g]
            if ended[i, u, g] or last:
                cuts += last and not ended[i, u, g]
                monte_carlo += factor * ahead
                break
        assert float(ours[i, t, g]) == pytest.approx(expected, abs=1e-5)
        if gae_lambda == 1 and mask[i, t, g]:
            assert float(ours[i, t, g]) + value[i, t, g] == pytest.approx(monte_carlo, abs=1e-5)
    assert cuts > 20


def ppo_batch(state, rows=24, seed=1):
    """Random samples [M, rows, ...] of an older policy; of the last learner a third does not count"""
    args, policy = state.args, state.networks["policy"]
    m = len(state.horizon)
    steps = some_steps(args, m, 1, rows, seed)
    steps["mask"][:] = True
    steps["mask"][-1, :, ::3] = False
    batch, _ = hop.make_ppo_batch(args, steps, real=True)
    with torch.no_grad():
        log_probs, _ = policy(*(batch[name] for name in hop.POLICY_READS))
    noise = 0.3 * torch.randn(m, rows, generator=seeded(seed))
    batch["log_prob"] = log_probs.gather(2, batch["action"])[..., 0] + noise
    return batch


PPO = {"seats": "learner,learner,random"}  # two learners


def test_updates_are_those_of_plain_ppo():
    """As CleanRL does it: each learner alone, in a loop over minibatches of the samples that count"""
    state = make_state("ppo", **PPO, learning_rate=3e-3, update_epochs=3, max_grad_norm=0.4)
    args, policy = state.args, state.networks["policy"]
    start, batch = copy.deepcopy(policy.state_dict()), ppo_batch(state)
    torch.manual_seed(4)
    found = hop.ppo_update(state, batch)
    counted = batch["weight"] > 0
    assert counted.sum(1).tolist() == [24, 16]
    for m in range(2):
        agent = hop.ActorCritic(args)
        agent.load_state_dict({name: x[m : m + 1] for name, x in start.items()})
        adam = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
        rows = torch.cat([counted[m].nonzero()[:, 0], (~counted[m]).nonzero()[:, 0]])  # those that count come first
        torch.manual_seed(4)
        sums, updates = {}, 0
        for _ in range(3):
            for index in torch.rand(24).argsort().tensor_split(2):
                index = rows[index][counted[m, rows[index]]]
                mb = {name: x[m : m + 1, index] for name, x in batch.items()}
                log_probs, value = agent(*(mb[name] for name in hop.POLICY_READS))
                dist = torch.distributions.Categorical(logits=log_probs)
                log_ratio = dist.log_prob(mb["action"][..., 0]) - mb["log_prob"]
                ratio, advantage = log_ratio.exp(), mb["advantage"]
                advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
                clipped = torch.clamp(ratio, 0.8, 1.2) * advantage
                policy_loss = -torch.min(ratio * advantage, clipped).mean()
                value_loss = 0.5 * ((value - mb["returns"]) ** 2).mean()
                entropy = dist.entropy().mean()
                adam.zero_grad()
                (policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss).backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), 0.4)
                adam.step()
                seen = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "grad_norm": norm}
                seen["approx_kl"] = (ratio - 1 - log_ratio).mean()
                seen["clipfrac"] = ((ratio - 1).abs() > 0.2).float().mean()
                sums = {name: sums.get(name, 0.0) + float(x.detach()) for name, x in seen.items()}
                updates += 1
        for name, p in agent.named_parameters():
            torch.testing.assert_close(policy.params[name][m : m + 1], p, atol=1e-6, rtol=1e-5)
        for name, total in sums.items():  # over all minibatches
            assert float(found[f"losses/{name}"][m]) == pytest.approx(total / updates, abs=1e-5), name
        assert sums["grad_norm"] / updates > 0.4 and 0 < sums["clipfrac"] < updates


def test_samples_without_weight_do_not_matter():
    """They are left out on a CPU; on a GPU, where shapes must not change, they are there without weight."""
    state = make_state("ppo", **PPO)
    batch, losses = ppo_batch(state), []
    off = batch["weight"] == 0
    for junk in (0.0, 1e3):
        changed = batch | {name: batch[name] + junk * off for name in ("returns", "advantage", "value")}
        losses.append(hop.ppo_loss(state.args, state.networks["policy"], changed)[0])
    assert torch.equal(*losses) and off.any()


@pytest.mark.parametrize("data", ["real", "mixed"])
def test_the_critic_learns_from_imagined_samples_only_if_asked_to(data):
    """The actor from both: with --critic-data real, they stay in the batch, also on a CPU, where rows that nobody
    counts are left out"""
    flags = {"critic_data": data, "imagined_weight": 0.5, "update_epochs": 1, "vf_coef": 5.0, "max_grad_norm": 100.0}
    state = make_state(num_envs=12, offline_ratio=0.0, **flags)
    dream, _ = hop.make_ppo_batch(state.args, imagine(state, 2).samples, real=False)
    real, _ = hop.make_ppo_batch(state.args, play(state, 8)[0], real=True)
    assert real["weight"].unique().tolist() == [0, 1] and torch.equal(real["critic_weight"], real["weight"])
    assert dream["weight"].unique().tolist() == [0, 0.5] and real["real"].all() and not dream["real"].any()
    assert torch.equal(dream["critic_weight"], dream["weight"] * (data == "mixed"))
    batch = {name: torch.cat([real[name], dream[name]], 1) for name in real}
    batch["log_prob"] = batch["log_prob"] + 0.1 * batch["action"][..., 0]  # of an older policy
    start = copy.deepcopy(state.networks["policy"].state_dict())
    found = []
    for changes in ({}, {"returns": 50.0}, {"advantage": -batch["advantage"]}):  # in the imagined samples
        hop.copy_nested_(state.networks["policy"].state_dict(), start)
        state.optimizers["policy"] = hop.Adam([state.networks["policy"]], 0.01, max_norm=100.0)
        changed = {name: torch.where(batch["real"], batch[name], x) for name, x in changes.items()}
        torch.manual_seed(4)
        metrics = hop.ppo_update(state, batch | changed)
        found.append(metrics | copy.deepcopy(state.networks["policy"].state_dict()))
    plain, other, flipped = found
    assert torch.equal(plain["critic.weight"], other["critic.weight"]) == (data == "real")
    assert (other["losses/value_loss_imagined"] > 100).all() and (plain["losses/value_loss_imagined"] < 100).all()
    assert (other["losses/value_loss_real"] < 100).all()
    assert (flipped["actor.weight"] != plain["actor.weight"]).flatten(1).any(1).all(), "the actor learns from both"


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_share_of_real_samples_in_the_batch(ratio):
    """Of those that count, where the whole horizon is trusted"""
    state = make_state(ppo_real_ratio=ratio, num_envs=16, num_steps=16, offline_ratio=0.0)
    with mock.patch.object(hop, "ppo_update", return_value={}) as ppo_update:
        samples, _ = train(state)
    _, batch = ppo_update.call_args.args
    assert batch["real"].float().mean() == pytest.approx(ratio, abs=0.01)
    if 0 < ratio < 1:  # every learner its own
        for name, x in batch.items():
            assert torch.equal(x, torch.cat([samples["real"][name], samples["imagined"][name]], 1)), name


# ---- Metrics
@pytest.mark.parametrize("seats", [None, "learner,nearest_hare,learner"])
def test_charts_count_every_finished_game_of_every_seat(seats):
    state = make_state("ppo", seats=seats, num_seeds=2, num_envs=16, num_steps=20)
    (_, metrics), log = recorded(state, lambda: train(state))
    metrics, returns, games = hop.read_metrics(state), np.zeros((32, 3)), {0: [], 1: []}
    for before, _, reward, done, _ in log:
        returns += reward.numpy()
        for b in done.nonzero()[:, 0].tolist():
            games[b // 16].append((returns[b].copy(), int(before.time[b]) + 1))
            returns[b] = 0
    learners = [i for i, name in enumerate(seats_table(seats, 3)) if name == "learner"]
    for seed, finished in games.items():
        row = hop.log_row(state.args, metrics, seed)
        earned, length = np.array([g[0] for g in finished]), np.mean([g[1] for g in finished])
        mean = earned.mean(0)
        expected = {"episodic_return": mean[learners].mean(), "length": length}
        expected |= {f"episodic_return/player_{i}": mean[i] for i in range(3)}
        expected |= {"stag_share": (earned > 1).mean(), "hare_share": ((earned > 0) & (earned <= 1)).mean()}
        for name, value in expected.items():
            assert row[f"charts/{name}"] == pytest.approx(value, rel=1e-5), name
        assert row["per_agent/return_gap"] == pytest.approx(np.ptp(mean[learners]), rel=1e-5)
        assert len(finished) > 30 and (earned > 0).any()
        own = metrics["real/value_mean"].reshape(2, -1)[seed]
        assert row["real/value_mean"] == pytest.approx(own.mean()) and len(own) == len(learners)
        logged = [row[f"per_agent/real_samples/learner_{i}"] for i in range(len(learners))]
        assert logged == pytest.approx(metrics["real/samples"].reshape(2, -1)[seed])
        assert not any(name.startswith("games/") for name in row)
    assert math.isnan(hop.log_row(state.args, metrics | {"games/ended": np.zeros((2, 3))}, 0)["charts/stag_share"])


def test_moa_metrics_are_those_of_a_plain_count(monkeypatch):
    """On every 8th step, of co-players on the board; ties share"""
    state, gone = make_state("ppo-omg", num_envs=16, num_steps=16, seats="learner,learner,nearest_stag"), 0
    play(state, 4)
    steps, _ = play(state, 16)
    generator = np.random.default_rng(1)
    probs = generator.dirichlet(np.ones(7), (2, 2, 16, 2)).astype(np.float32)
    probs[:, :, :5] = np.array([0.3, 0.3, 0.3, 0.1, 0, 0, 0])
    monkeypatch.setattr(hop, "predict_actions", lambda *_: torch.tensor(probs).flatten(1, 2))
    found = hop.moa_metrics(state, steps)
    there = co_players_there(steps, TINY_CONFIG)
    read = (steps[name].flatten(1, 2) for name in hop.POLICY_READS)
    with torch.no_grad():
        of_policy = state.networks["policy"](*read)[0].exp().unflatten(1, (16, 16))
    for m in range(2):
        nll, top1, ceiling, ceiling_top1 = [], [], [], []
        for (i, t), e, k in itertools.product(enumerate((7, 15)), range(16), (0, 1)):
            if not there[m, t, e, k]:
                gone += 1
                continue
            p, action = probs[m, i, e, k], int(steps["joint"][m, t, e, 1 + k])
            best = (p == p.max()) / (p == p.max()).sum()
            nll.append(-math.log(max(p[action], 1e-9)))
            top1.append(best[action])
            own = steps["others_probs"][m, t, e, k]
            seat = (m + 1 + k) % 3
            if seat < 2:
                torch.testing.assert_close(own, of_policy[seat, t, e])
            ceiling.append(-math.log(own[action]))
            ceiling_top1.append(float(own[action] == own.max()) / int((own == own.max()).sum()))
        expected = {"nll": np.mean(nll), "top1": np.mean(top1)}
        expected |= {"ceiling/nll": np.mean(ceiling), "ceiling/top1": np.mean(ceiling_top1)}
        for name, value in expected.items():
            assert float(found[f"moa/{name}"][m]) == pytest.approx(value, rel=1e-4), name
    assert gone > 5


def test_batch_metrics_are_over_the_samples_that_count():
    args = make_args("ppo")
    steps = some_steps(args)
    batch, found = hop.make_ppo_batch(args, steps, real=True)
    for m in range(2):
        x = {name: batch[name][m][batch["weight"][m] > 0].numpy() for name in ("reward", "returns", "value")}
        assert float(found["real/samples"][m]) == len(x["reward"]) < 96
        assert float(found["real/share"][m]) == pytest.approx(len(x["reward"]) / 96)
        for name, of_batch in (("reward", "reward"), ("return", "returns"), ("value", "value")):
            assert float(found[f"real/{name}_mean"][m]) == pytest.approx(x[of_batch].mean(), abs=1e-5)
            assert float(found[f"real/{name}_std"][m]) == pytest.approx(x[of_batch].std(), abs=1e-5)
        explained = 1 - (x["returns"] - x["value"]).var() / x["returns"].var()
        assert float(found["losses/explained_variance"][m]) == pytest.approx(explained, abs=1e-4)


def test_metrics_are_means_over_the_iterations_since_the_last_row():
    """Of those in which they are numbers"""
    state = make_state("ppo")
    samples = {"real/samples": torch.ones(3)}  # are there in every iteration
    for i in range(1, 5):
        mine = {"my/a": torch.tensor([i, 2 * i, 3 if i == 2 else math.nan]), "games/b": torch.full((1, 3), i)}
        hop.add_metrics(state, samples | mine)
    for _ in range(2):
        found = hop.read_metrics(state)
        assert found["my/a"].tolist() == [2.5, 5.0, 3.0] and found["games/b"].tolist() == [[10.0] * 3]
    for x in state.sums.values():
        x.zero_()
    hop.add_metrics(state, samples | {"my/a": torch.tensor([7, 8, 9])})
    assert hop.read_metrics(state)["my/a"].tolist() == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.ones(3, 1), torch.ones(2)])
def test_a_metric_that_is_not_one_number_per_learner_is_named(value, capsys):
    with pytest.raises(SystemExit):
        hop.add_metrics(make_state("ppo"), {"my/metric": value})
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1 and "my/metric" in sentence and str(list(value.shape)) in sentence
