"""benchmarks/baselines/ppo_gru.py: it learns, what it recomputes is what it did, seeds and games do not mix."""

import dataclasses
import sys

import hopplus_ppo as hop
from benchmarks.baselines import ppo_gru
from stag_hunt_env import NUM_ACTIONS, STAY, StagHuntConfig

import pytest
import torch
from helpers import lines_of, record_learning_rates, without_times

CONFIG = StagHuntConfig(
    height=3, width=4, num_players=3, num_stags=2, num_hares=5, final_time=7, steps_after_first_hunt=3
)
TINY = {
    **{"config": CONFIG, "seats": "mixed,learner,nearest_hare", "num_envs": 48, "num_steps": 13, "hidden": 16},
    **{"num_minibatches": 3, "update_epochs": 2, "log_every": 1, "total_timesteps": 3 * 48 * 13},
}
# Cells of all come first, the learner's own before all, then walls, of which there are none
ENTITIES, NOWHERE = 3 + 2 + 5, 12
JOINT = slice(ENTITIES + 1, ENTITIES + 1 + 21)
MODELS = ("gru", "liam")
CPU = torch.device("cpu")


def tiny(redraw="never", device="cpu", **changes):
    return ppo_gru.Args(**{**TINY, "redraw": redraw, "device": device, **changes})


def played(args, iterations=2):
    """-> TrainState, and a rollout after some training: as ppo_update reads it, and all that was seen"""
    state = ppo_gru.TrainState(args, 0, CPU)
    for _ in range(iterations):
        ppo_gru.train_iteration(state)
    steps, _ = ppo_gru.rollout(state, state.games)
    return state, ppo_gru.make_ppo_batch(args, steps)[0], steps


def recompute(agent, batch, first=0, state=None):
    """-> log-probabilities of the actions, values, and the last state, from step `first` on"""
    x, legal, reset, action = (batch[name][:, first:] for name in ("x", "legal", "reset", "action"))
    log_probs, value, state = agent(x, legal, reset, batch["state"] if state is None else state)
    return log_probs.gather(3, action[..., None]).squeeze(3), value, state


# ---- Learning


def test_it_learns(tmp_path):
    """Beside a hunter of stags: 0.6 at random, 5 is the most"""
    config = StagHuntConfig(height=3, width=3, num_players=2, num_hares=1, final_time=6)
    changes = {"config": config, "seats": "learner,nearest_stag", "num_envs": 64, "num_steps": 8, "hidden": 32}
    changes |= {"update_epochs": 3, "num_minibatches": 2, "learning_rate": 1e-2, "total_timesteps": 15 * 512}
    ppo_gru.main(tiny(**changes, num_seeds=2, log_every=3, run_dir=str(tmp_path)))
    folders = sorted(tmp_path.iterdir())
    assert [folder.name.split("__")[2] for folder in folders] == ["1", "2"]
    for folder in folders:
        lines = lines_of(folder)
        assert [line["steps"] for line in lines] == [1536, 3072, 4608, 6144, 7680]
        assert lines[0]["charts/episodic_return"] < 2.5 and lines[-1]["charts/episodic_return"] > 4.0
        assert {path.name.split(".")[0] for path in folder.iterdir()} >= {"args", "events", "metrics"}
    assert [(folder / "checkpoint.pt").exists() for folder in folders] == [True, False], "one for all"


def test_the_learning_rate_falls_to_a_tenth(tmp_path, monkeypatch):
    rates = record_learning_rates(monkeypatch)
    changes = {"num_envs": 4, "num_steps": 2, "total_timesteps": 3 * 8, "update_epochs": 1, "num_minibatches": 1}
    ppo_gru.main(tiny(**changes, learning_rate=0.01, run_dir=str(tmp_path)))
    assert rates == [pytest.approx([0.01, 0.007, 0.004])]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("keep_state", [False, True])
def test_what_is_recomputed_is_what_was_played(keep_state, model):
    trained, batch, steps = played(tiny(keep_state=keep_state, model=model))
    log_prob, value, state = recompute(trained.networks["policy"], batch)
    assert batch["state"].abs().max() > 0.1, "the rollout begins with a state that it was given"
    torch.testing.assert_close(log_prob, batch["log_prob"], atol=1e-5, rtol=0)
    torch.testing.assert_close(value, steps["value"][:, :-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(state, trained.games.state, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_loss_is_that_of_ppo():
    """The ratios leave the clip range on both sides"""
    args = tiny(num_seeds=2, ent_coef=0.3, vf_coef=0.7)
    with torch.enable_grad():
        state, batch, _ = played(args)
    agent = state.networks["policy"]
    batch["log_prob"] = batch["log_prob"] + 0.5 * torch.randn(batch["log_prob"].shape)
    loss, metrics = ppo_gru.ppo_loss(args, agent, batch)
    log_probs, value, _ = agent(batch["x"], batch["legal"], batch["reset"], batch["state"])
    for seed in range(2):
        rows = batch["mask"][seed]  # who has left does not count
        own = {name: x[seed][rows] for name, x in batch.items() if name != "state"}
        said = torch.distributions.Categorical(logits=log_probs[seed][rows])
        ratio = (said.log_prob(own["action"]) - own["log_prob"]).exp()
        assert ratio.min() < 0.7 and ratio.max() > 1.3
        gain = (own["advantage"] - own["advantage"].mean()) / own["advantage"].std(unbiased=False)
        policy_loss = -float(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean())
        value_loss = float(0.5 * (value[seed][rows] - own["returns"]).square().mean())
        entropy = float(said.entropy().mean())
        found = {name.removeprefix("losses/"): float(x[seed]) for name, x in metrics.items()}
        expected = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert float(loss[seed]) == pytest.approx(policy_loss + 0.7 * value_loss - 0.3 * entropy, rel=1e-3)


@torch.no_grad()
def test_the_recurrence_is_that_of_torch():
    gru = ppo_gru.Agent(tiny(num_seeds=2), [3, 4]).gru
    gru.state.bias.normal_()
    features, state = torch.randn(2, 7, 5, 16), torch.randn(2, 5, 16)
    states = gru(features, torch.zeros(2, 7, 5, dtype=torch.bool), state)
    for number in range(2):
        theirs = torch.nn.GRU(16, 16)
        weights = {}
        for kind, layer in (("ih", gru.input), ("hh", gru.state)):
            weights |= {f"weight_{kind}_l0": layer.weight[number].T, f"bias_{kind}_l0": layer.bias[number, 0]}
        theirs.load_state_dict(weights)
        torch.testing.assert_close(states[number], theirs(features[number], state[number : number + 1])[0])


# ---- What the learner sees, and when it forgets


@pytest.mark.parametrize("keep_state", [False, True])
def test_the_last_step_is_seen(keep_state, monkeypatch):
    """Also that of the last game, if the state is kept; in ego order"""
    args, seen = tiny(keep_state=keep_state, state_reset_prob=0.0), []
    state = ppo_gru.TrainState(args, 0, CPU)
    advance = state.env.advance
    monkeypatch.setattr(state.env, "advance", lambda actions: seen.append(actions.clone()) or advance(actions))
    batch, _ = ppo_gru.rollout(state, state.games)
    actions, starts = torch.stack(seen)[:-1].roll(-1, 2), batch["done"][0, :-1]  # the learner's seat is 1
    x = batch["x"][0]
    cells, _, joint, clock, reward = x.split([ENTITIES, 1, 21, 1, 1], 2)
    shown = joint[1:].unflatten(2, (3, 7)).argmax(3)
    assert 10 < starts.sum() < starts.numel() / 2 and (actions[starts] != STAY).any()
    expected = actions if keep_state else actions.masked_fill(starts[..., None], STAY)
    assert torch.equal(shown, expected) and torch.equal(actions[..., 0], batch["action"][0, :-1])
    got = batch["reward"][0, :-1]
    assert torch.equal(reward[1:, :, 0], got if keep_state else got.masked_fill(starts, 0.0))
    assert torch.equal(clock[1:, :, 0] == 0, starts) and (joint[0].unflatten(1, (3, 7)).argmax(2) == STAY).all()
    assert torch.equal(cells[..., 0] < NOWHERE, batch["mask"][0]) and ((cells >= 0) & (cells <= NOWHERE)).all()


@pytest.mark.parametrize("pieces", [0, 2])
def test_it_has_the_eyes_of_hopplus(pieces):
    """With the same weights it sees the same"""
    config = dataclasses.replace(CONFIG, height=4, max_wall_pieces=pieces)
    args = tiny(config=config, num_seeds=2, num_envs=12, num_minibatches=1)
    state = ppo_gru.TrainState(args, 0, CPU)
    agent, games = state.networks["policy"], state.games
    features = agent.features
    theirs = hop.Stacked(lambda _: hop.BoardEncoder(config, args.hidden), args, [1, 2], CPU)
    for name, mine in theirs.params.items():
        mine.data.copy_(features.get_parameter(name.replace("mix.0", "board.1")).detach().view_as(mine))
    features.board.register_forward_hook(lambda *given: seen.append(given[2][:, 0]))
    for _ in range(5):
        seen = []
        x, *_ = ppo_gru.act(agent, games, state.env.state)
        (ours,) = seen
        board = games.seats.to_learners(hop.Games.boards(games, state.env.state)).float()
        torch.testing.assert_close(ours, theirs(board))
        ppo_gru.rollout(state, games)
    assert ours.std() > 0.01 and (x[..., :ENTITIES] == config.num_cells).any()


@pytest.mark.parametrize(("keep_state", "prob"), [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_the_state_is_reset_with_the_game_unless_kept(keep_state, prob):
    """And with the given probability where it is kept: with it goes what the last step showed"""
    state, batch, rest = played(tiny(keep_state=keep_state, state_reset_prob=prob))
    agent = state.networks["policy"]
    first = 5
    ended, starts = rest["done"][0, first - 1], batch["reset"][0, first]
    assert 0 < ended.sum() < len(ended) and not (starts & ~ended).any()
    if prob:
        assert 0 < starts.sum() < ended.sum()
    else:
        assert torch.equal(starts, ended & (not keep_state))
    random = torch.randn_like(batch["state"])
    same = (recompute(agent, batch, first, random)[1] - rest["value"][:, first:-1])[0].abs().amax(0) < 1e-5  # [E]
    same &= ~batch["reset"][0, first + 1 :].any(0) | starts  # or else it was reset later
    assert torch.equal(same, starts)
    joint, reward = batch["x"][0, first, :, JOINT], batch["x"][0, first, :, -1]
    assert (joint[starts].unflatten(1, (3, 7)).argmax(2) == STAY).all() and not reward[starts].any()


def test_the_state_is_kept_where_the_partner_may_stay():
    kept = {redraw: ppo_gru.Args(redraw=redraw).keep_state for redraw in ("never", "0.5", "game")}
    assert kept == {"never": True, "0.5": True, "game": False}
    assert ppo_gru.Args(redraw="game", keep_state=True).keep_state


@pytest.mark.parametrize("flags", [{}, {"redraw": "game"}, {"keep_state": False}, {"unsteady": 0.0}])
def test_partners_are_unsteady_where_the_state_is_kept(flags):
    """In the first 50 of 100 places a new one comes after each game; who keeps no state has its partners for ever"""
    config = StagHuntConfig(final_time=5)
    args = ppo_gru.Args(config=config, num_envs=100, num_steps=6, hidden=4, device="cpu", **flags)
    state = ppo_gru.TrainState(args, 0, CPU)
    seats = state.games.seats
    before = seats.kinds[:, 1].clone()
    changed = torch.zeros(100, dtype=torch.bool)
    for _ in range(10):
        ppo_gru.rollout(state, state.games)
        changed |= seats.kinds[:, 1] != before
    first = {"game": 100, "never": 50 if not flags else 0}[args.redraw]
    assert torch.equal(changed, torch.arange(100) < first)


# ---- Which samples count


def test_a_game_ends_for_the_learner_when_it_leaves():
    args = tiny()
    _, batch, rest = played(args, 2)
    mask, ended, reward, value = batch["mask"], rest["ended"], rest["reward"], rest["value"]
    assert (ended | ~rest["done"]).all() and (mask | (reward == 0)).all()
    caught = reward > 0  # and so it left
    assert caught.sum() > 10 and ended[caught].all() and not mask[:, 1:][(caught & ~rest["done"])[:, :-1]].any()
    assert not (ended & mask & ~rest["done"] & ~caught).any()
    torch.testing.assert_close(batch["returns"][ended & mask], reward[ended & mask])
    assert (batch["advantage"][~mask] == 0).all()
    expected = torch.zeros_like(value[:, 0])
    for t in reversed(range(reward.shape[1])):
        ahead = args.gamma * ~ended[:, t] * (value[:, t + 1] + args.gae_lambda * expected)
        expected = mask[:, t] * (reward[:, t] + ahead - value[:, t])
        torch.testing.assert_close(batch["advantage"][:, t], expected, atol=1e-5, rtol=0)


# ---- Seeds


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_does_not_change_when_another_is_added(model):
    """The same games -> the same metrics and weights"""
    args = tiny(num_seeds=2, seed=5, max_grad_norm=0.02, model=model)
    state, batch, _ = played(args)
    before = {name: p.detach().clone() for name, p in state.networks["policy"].params.items()}
    state.optimizers = ppo_gru.TrainState(args, 0, CPU).optimizers
    agent = state.networks["policy"]
    for name, optimizer in state.optimizers.items():
        optimizer.params = list({"policy": agent, "liam": agent.liam}[name].params.values())
    torch.manual_seed(1)
    together = ppo_gru.ppo_update(state, batch)
    assert together["losses/grad_norm"].min() > args.max_grad_norm, "gradients are clipped"
    for number in range(2):
        alone = ppo_gru.TrainState(dataclasses.replace(args, num_seeds=1), 0, CPU)
        for name, p in alone.networks["policy"].params.items():
            p.data.copy_(before[name][number : number + 1])
        own_batch = {name: x[number : number + 1] for name, x in batch.items()}
        torch.manual_seed(1)
        for name, x in ppo_gru.ppo_update(alone, own_batch).items():
            torch.testing.assert_close(x, together[name][number : number + 1], msg=name)
        for name, p in alone.networks["policy"].params.items():
            both = state.networks["policy"].params[name]
            torch.testing.assert_close(p[0], both[number], atol=1e-5, rtol=1e-4)
            assert (both[0] != both[1]).any() and (both != before[name]).flatten(1).any(1).all(), name


# ---- LIAM


@torch.no_grad()
@pytest.mark.parametrize("pieces", [0, 2])
def test_liam_reconstructs_what_co_players_see_and_do(pieces, monkeypatch):
    """At this step, each in its own ego order, only where it is on the board: the loss is that of the paper"""
    config = dataclasses.replace(CONFIG, height=4, max_wall_pieces=pieces)
    args = tiny(config=config, model="liam", num_seeds=2, embedding_dim=6)
    state = ppo_gru.TrainState(args, 0, CPU)
    agent, env = state.networks["policy"], state.env
    seen, advance = [], env.advance

    def watched(actions):
        seen.append((env.observe(env.state), env.state.present.clone(), actions))
        return advance(actions)

    monkeypatch.setattr(env, "advance", watched)
    steps, _ = ppo_gru.rollout(state, state.games)
    batch, _ = ppo_gru.make_ppo_batch(args, steps)
    of_seats = [torch.stack(x).unflatten(1, (2, 48)).transpose(0, 1) for x in zip(*seen, strict=True)]
    # The learner's seat is 1: seats 2 and 0 follow
    planes, present, actions = (x[:, :, :, [2, 0]] for x in of_seats)
    assert planes[..., 3, :, :].any().item() == (pieces > 0), "walls"
    assert torch.equal(batch["co_actions"], actions) and 0.2 < present.float().mean() < 0.95
    loss, metrics = ppo_gru.liam_loss(config, agent.liam, batch)
    z, states = agent.liam(batch["x"], batch["reset"], batch["state"])
    assert z.shape == (2, 13, 48, 6) and states.shape == (2, 13, 48, 16)
    torch.testing.assert_close(states[:, -1], state.games.state)
    decoded = agent.liam.views(z).view(planes.shape)
    logits = agent.liam.actions(z).view(2, 13, 48, 2, NUM_ACTIONS)
    for seed in range(2):
        there = present[seed]
        views = 0.5 * (decoded[seed] - planes[seed])[there].square().flatten(1).sum(1).mean()
        said = torch.distributions.Categorical(logits=logits[seed][there])
        nll = -said.log_prob(actions[seed][there]).mean()
        top1 = (said.logits.argmax(1) == actions[seed][there]).float().mean()
        found = [float(metrics[name][seed]) for name in ("losses/liam_views", "losses/liam_actions", "liam/top1")]
        assert found == pytest.approx([float(views), float(nll), float(top1)], rel=1e-4)
        assert float(loss[seed]) == pytest.approx(float(views + nll), rel=1e-4)


def test_each_loss_of_liam_trains_its_own_part():
    state, batch, _ = played(tiny(model="liam"))
    agent = state.networks["policy"]
    losses = {
        "policy": ppo_gru.ppo_loss(state.args, agent, batch)[0],
        "liam": ppo_gru.liam_loss(CONFIG, agent.liam, batch)[0],
    }
    for name, loss in losses.items():
        before = {key: p.detach().clone() for key, p in agent.params.items()}
        state.optimizers[name].step(loss)
        moved = {key for key, p in agent.params.items() if (p != before[key]).any()}
        assert moved == {key for key in before if key.startswith("liam.") == (name == "liam")}


def test_the_policy_reads_the_embedding():
    """And what it sees, but no state of the GRU"""
    state, batch, _ = played(tiny(model="liam"))
    agent = state.networks["policy"]
    inputs = [batch[name] for name in ("x", "legal", "reset", "state")]
    log_probs, value, _ = agent(*inputs)
    heads = agent.actor[0].weight.data, agent.critic[0].weight.data
    assert all(weight.shape[1] == 16 + 64 for weight in heads)
    for weight in heads:
        weight[:, 16:] = 0.0
    blind, blind_value, _ = agent(*inputs)
    assert not torch.equal(log_probs, blind) and not torch.equal(value, blind_value)
    inputs[3] = torch.randn_like(inputs[3])
    assert torch.equal(agent(*inputs)[0], blind)


def test_reconstruction_learns(tmp_path):
    """What hunters of stags and of hares do is nearly certain, from what the learner sees"""
    config = StagHuntConfig(height=3, width=3, num_players=2, num_hares=1, final_time=6)
    changes = {"config": config, "seats": "learner,mixed", "population": "nearest_stag,nearest_hare", "redraw": "never"}
    changes |= {"num_envs": 128, "num_steps": 8, "num_minibatches": 2, "update_epochs": 8}
    changes |= {"hidden": 32, "liam_learning_rate": 3e-3}
    ppo_gru.main(tiny(**changes, model="liam", log_every=2, total_timesteps=10 * 1024, run_dir=str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    assert "_liam__" in folder.name
    first, *_, last = lines_of(folder)
    assert last["losses/liam_views"] < 0.85 * first["losses/liam_views"]
    assert last["losses/liam_actions"] < 0.6 * first["losses/liam_actions"]
    assert last["liam/top1"] > first["liam/top1"] + 0.2


# ---- Flags, CUDA

WRONG = [
    ("--seats learner,learner,random,random", "there must be one learner"),
    ("--num-envs 4 --num-minibatches 5", "--num-minibatches must be at most --num-envs"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_wrong_flags_are_named(words, sentence, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo_gru.py", *words.split()])
    with pytest.raises(ValueError, match=sentence):
        ppo_gru.parse_args()


@pytest.mark.filterwarnings("error")
def test_a_row_in_which_no_game_ended_has_no_return(tmp_path):
    ppo_gru.main(tiny(num_steps=1, total_timesteps=9 * 48, run_dir=str(tmp_path)))
    (folder,) = tmp_path.iterdir()
    returns = [line["charts/episodic_return"] for line in lines_of(folder)]
    assert returns[0] is None and returns[-1] is not None


def test_a_loss_that_is_no_number_stops_the_run(tmp_path, monkeypatch, capsys):
    loss = ppo_gru.ppo_loss

    def broken(*given):
        total, metrics = loss(*given)
        return total, metrics | {"losses/entropy": total.detach() * torch.nan}

    monkeypatch.setattr(ppo_gru, "ppo_loss", broken)
    with pytest.raises(SystemExit):
        ppo_gru.main(tiny(run_dir=str(tmp_path)))
    assert "['losses/entropy'] no number in iteration 1" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize(("redraw", "model"), [("never", "gru"), ("game", "gru"), ("never", "liam")])
def test_captured_iterations_equal_eager_ones(redraw, model, tmp_path):
    found = []
    for use in (False, True):
        run_dir = tmp_path / str(use)
        changes = {"num_seeds": 2, "total_timesteps": 6 * 48 * 13, "cudagraphs": use, "model": model}
        ppo_gru.main(tiny(redraw, "cuda", **changes, run_dir=str(run_dir)))
        folder = sorted(run_dir.iterdir())[0]
        checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
        weights = checkpoint["states"][0]["networks"]["policy"]
        found.append((weights, without_times(lines_of(folder))))
    (eager, eager_lines), (captured, captured_lines) = found
    assert len(captured_lines) == 6
    for name, p in captured.items():
        torch.testing.assert_close(p, eager[name], atol=1e-6, rtol=0, msg=name)
    for ours, expected in zip(captured_lines, eager_lines, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("model", MODELS)
def test_an_iteration_never_waits_for_the_host(model):
    state = ppo_gru.TrainState(tiny(device="cuda", num_seeds=2, model=model), 0, torch.device("cuda"))
    ppo_gru.train_iteration(state)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ppo_gru.train_iteration(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
