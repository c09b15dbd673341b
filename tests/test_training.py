"""hopplus_ppo.py: what each flag changes, the preparation, and what falls in the course of a run"""

import copy
import dataclasses
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import hopplus_ppo as hop
from evaluation import adapt
from stag_hunt_env import STAY, Run

import pytest
import torch
from helpers import TINY_CONFIG, lines_of, record_learning_rates, same_tree
from test_imagination import TrueWorld, wrong
from tiny_hopplus import encode, make_args, make_state, play, train, watch_networks

# ---------------------------------------------------------------------------------------------------------------------
# The optimiser


def test_it_is_torchs_adam():
    torch.manual_seed(0)
    ours = [
        torch.nn.Parameter(torch.randn(4, 3, 5)),
        torch.nn.Parameter(torch.randn(4, 5)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    adam = hop.Adam(ours, 0.5, eps=1e-5, beta2=0.99)
    reference = torch.optim.Adam(theirs, lr=torch.tensor(0.01), eps=1e-5, betas=(0.9, 0.99), fused=True)
    adam.param_groups[0]["lr"].fill_(0.01)
    for _ in range(5):
        adam.zero_grad()
        assert all(p.grad is None for p in ours)
        for p, q in zip(ours[:2], theirs[:2], strict=True):  # nothing learns the third
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        adam.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)
    assert torch.equal(ours[2], torch.ones(2))
    torch.testing.assert_close(adam.state[ours[0]]["exp_avg_sq"], reference.state[theirs[0]]["exp_avg_sq"])


def test_small_gradients_of_the_policy_count_little():
    """PPO's Adam adds 1e-5 where it divides by a gradient's size, that of the models 1e-8"""
    state = make_state()
    for name, params, share in (
        ("policy", state.networks.policy.parameters(), 0.5),
        ("opponents", state.networks.moa.parameters(), 1.0),
        ("world", state.networks.world.parameters(), 1.0),
    ):
        before = [p.detach().clone() for p in params]
        loss = 1e-5 * sum(p.flatten(1).sum(1) for p in params)
        hop.optimizer_step(state.optimizers[name], loss, 1.0)
        rate = float(state.optimizers[name].param_groups[0]["lr"])
        for p, old in zip(params, before, strict=True):
            torch.testing.assert_close(old - p, torch.full_like(p, share * rate), atol=1e-6, rtol=5e-3, msg=name)


# ---------------------------------------------------------------------------------------------------------------------
# What each flag changes

FAST = {
    "config": dataclasses.replace(TINY_CONFIG, final_time=3),  # games end within a rollout
    **{"num_envs": 4, "num_steps": 5, "imagination_horizon": 2, "offline_ratio": 0.0, "learning_rate": 0.03},
    **{"wm_updates": 1, "subgoal_updates": 1, "num_minibatches": 2, "update_epochs": 2},
}
PPO = {
    **{"seats": "learner,mixed,random", "num_envs": 6, "num_steps": 4, "learning_rate": 0.01, "policy_hidden": 4},
    **{"update_epochs": 1, "num_minibatches": 1, "gamma": 0.5, "gae_lambda": 0.5, "clip_coef": 1e-3},
    **{"ent_coef": 0.5, "vf_coef": 0.1, "max_grad_norm": 1e-3, "share_parameters": True},
}
MODELS = {
    **{"subgoals": "actions", "goal_kind": "discrete", "goal_dim": 3, "subgoal_hidden": 4},
    **{"subgoal_selection": "optimistic", "subgoal_horizon": 1, "kl_coef": 0.5},
    **{"memory_discount": 0.1, "history_reset_prob": 1.0, "subgoal_learning_rate": 0.01, "subgoal_updates": 0},
    **{"subgoal_batch_size": 2},
}
IMAGINATION = {
    **{"wm_hidden": 8, "wm_learning_rate": 0.01, "wm_updates": 0, "wm_batch_size": 8, "imagination": False},
    **{"imagination_horizon": 1, "trust_exact_match": 1.0, "ppo_real_ratio": 0.8, "critic_data": "real"},
    **{"imagined_weight": 0.2},
}
DRAWN = {"population": "random", "redraw": "never"}  # for mixed seats
ELSEWHERE = {  # tests of whole runs, of the preparation, of a GPU
    *("exp_name", "method", "seed", "num_seeds", "total_timesteps", "device", "run_dir", "resume", "log_every"),
    *("save_seconds", "anneal_lr", "hindsight_eps", "vae_checkpoint", "world_model_checkpoint"),
    *("pretraining_updates", "pretraining_games", "offline_ratio", "replay_rollouts", "watched_starts"),
    *("cudagraphs", "compile", "precision"),
}
CASES = [("ppo", {}, name, value) for name, value in PPO.items()]
CASES += [("ppo", {"seats": "learner,mixed,mixed"}, name, value) for name, value in DRAWN.items()]
CASES += [("ppo-omg", {"seats": "learner,mixed,mixed", "redraw": "never"}, "unsteady", 1.0)]
CASES += [("ppo-omg", {}, name, value) for name, value in MODELS.items()]
CASES += [("hopplus", {}, name, value) for name, value in IMAGINATION.items()]


@functools.cache
def trained(method, **changes):
    """All weights after one iteration"""
    state = make_state(method, **{**FAST, **changes})
    train(state)
    return {name: x.state_dict() for name, x in state.networks.present().items()}


@pytest.mark.parametrize(("method", "base", "name", "value"), CASES, ids=[case[2] for case in CASES])
def test_a_flag_changes_what_is_learned(method, base, name, value):
    plain, changed = trained(method, **base), trained(method, **base, **{name: value})
    assert getattr(make_args(method, **{**FAST, **base}), name) != value
    shapes, new_shapes = ({key: [p.shape for p in x.values()] for key, x in y.items()} for y in (plain, changed))
    assert shapes != new_shapes or not same_tree(plain, changed), f"{name} changes nothing"


def test_every_flag_changes_something():
    flags = {field.name for field in dataclasses.fields(hop.Args)} - {"config"}
    assert flags == {case[2] for case in CASES} | ELSEWHERE


@pytest.mark.parametrize("method", hop.METHODS)
def test_a_state_that_is_put_back_learns_the_same_again(method):
    """As before a CUDA graph is recorded: also where the replay was empty, and everything in place"""
    state, ends = make_state(method, num_envs=8, seats="learner,mixed,learner"), []
    if state.watched is not None:
        hop.watch_rule_based(state)
    before = copy.deepcopy(state.state_dict())
    assert "data" not in before["games"]["replay"]
    for _ in range(2):
        for _ in range(2):
            train(state)
        if state.watched is not None:
            hop.watch_rule_based(state)
        ends.append(copy.deepcopy(state.state_dict()))
        weights = state.networks.policy.parameters()
        state.load_state_dict(before)
        assert all(x is y for x, y in zip(weights, state.networks.policy.parameters(), strict=True))
    assert same_tree(*ends) and not same_tree(before["networks"], ends[0]["networks"])
    assert same_tree(state.state_dict()["networks"], before["networks"])
    assert same_tree(state.games.env.state_dict(), before["games"]["env"])


# ---------------------------------------------------------------------------------------------------------------------
# The preparation


def prepared(monkeypatch, **changes):
    """All weights after it, and those of the models that were pretrained: also what is not kept"""
    made, make_networks = [], hop.make_networks
    monkeypatch.setattr(hop, "make_networks", lambda *x, **y: (made.append(make_networks(*x, **y)), made[-1])[1])
    state = make_state(num_seeds=2, **changes)
    hop.pretrain(state.args, state, [1, 2], 0)
    monkeypatch.setattr(hop, "make_networks", make_networks)
    of_learners, pretrained = made
    assert of_learners is state.networks and of_learners.moa_prior is None
    return copy.deepcopy(state.state_dict()["networks"]), pretrained.moa_prior.state_dict()


def test_the_preparation_trains_every_model_with_a_falling_learning_rate(monkeypatch):
    """Each learner starts from a copy of its seed's. The first rate of each model is twice the second, and all updates
    that were asked for are made"""
    before, moa_prior_before = prepared(monkeypatch, pretraining_updates=0)
    rates = record_learning_rates(monkeypatch)
    after, moa_prior = prepared(monkeypatch, pretraining_updates=21)
    assert all((x != moa_prior_before[key]).flatten(1).any(1).all() for key, x in moa_prior.items())
    assert set(after) == {"policy", "prior", "inference", "moa", "world"}
    for name in ("prior", "inference", "moa", "world"):
        for key, new in after[name].items():
            old = before[name][key]
            assert (new != old).flatten(1).any(1).all(), f"{name} {key} is not trained"
            for seed in (new[:3], new[3:]):
                assert torch.equal(seed, seed[:1].expand_as(seed)), f"{name} {key} differs between a seed's learners"
            assert (new[0] != new[3]).any(), f"{name} {key} is the same for both seeds"
    assert same_tree(before["policy"], after["policy"])
    assert len(rates) == 2
    opponents, world = rates
    assert opponents == pytest.approx([3e-3] * 10 + [1.5e-3] * 11)
    assert world == pytest.approx([2e-3] * 10 + [1e-3] * 11)


def test_the_preparation_watches_as_many_games_as_asked(monkeypatch):
    changes = {"method": "ppo-omg", "pretraining_updates": 1}
    few, many = (prepared(monkeypatch, pretraining_games=n, **changes)[0]["moa"] for n in (2, 8))
    assert not same_tree(few, many)


def test_the_first_watched_games_are_seen_with_the_pretrained_weights():
    """The second rollout begins with the histories that the present networks make of the first"""
    state = make_state("ppo-omg", num_envs=16, history_reset_prob=0.0)
    hop.pretrain(state.args, state, [1], 0)
    first, second = (hop.Transitions(*(x[slot] for x in state.watched.replay.data)) for slot in (0, 1))
    steps = state.args.num_steps
    first = first._replace(history=first.history.expand(-1, steps, -1, -1, -1))
    following = second._replace(history=second.history.expand(-1, steps, -1, -1, -1))
    both = hop.Transitions(*(torch.cat([x, y], 1) for x, y in zip(first, following, strict=True)))
    expected = encode(state, both)[:, steps]
    torch.testing.assert_close(second.history[:, 0].float(), expected, atol=0.1, rtol=0.02)  # half precision


# ---------------------------------------------------------------------------------------------------------------------
# What falls in the course of a run


def test_learning_rates_of_a_run(monkeypatch, tmp_path):
    """The policy's falls to a tenth, unless asked not to; those of the models stay. Four iterations"""
    rates = record_learning_rates(monkeypatch)
    flags = {"learning_rate": 0.01, "subgoal_learning_rate": 2e-3, "wm_learning_rate": 3e-3, "run_dir": str(tmp_path)}
    flags |= {"update_epochs": 1, "num_minibatches": 1, "subgoal_updates": 1, "wm_updates": 1}
    flags |= {"pretraining_updates": 0, "offline_ratio": 0.0, "total_timesteps": 4 * 32}
    hop.main(make_args(**flags))
    found = sorted(rates, key=lambda x: x[0])
    falling = [0.01, 0.00775, 0.0055, 0.00325]
    assert found == [pytest.approx(x) for x in ([2e-3] * 4, [3e-3] * 4, falling)]
    rates.clear()
    hop.main(make_args("ppo", anneal_lr=False, **flags))
    assert rates == [pytest.approx([0.01] * 4)]


def test_hindsight_falls_to_nothing_halfway(monkeypatch, tmp_path):
    """MOA reads hindsight subgoals in as large a share of its training as asked at the start. Five iterations"""
    train_iteration, shares = hop.train_iteration, []

    def watched(state):
        prior = state.networks.prior.params
        prior["head.weight"].data.zero_()  # f_psi says 7 of every state, and so does hindsight
        prior["head.bias"].data.fill_(7.0)
        (moa,) = watch_networks(state, "moa")
        samples = train_iteration(state)
        goals = torch.cat([inputs[3] for _, inputs in moa.given], 1)
        shares.append(float((goals == 7).all(2).float().mean()))
        state.networks = state.networks._replace(moa=moa.stacked)
        return samples

    monkeypatch.setattr(hop, "train_iteration", watched)
    changes = {"pretraining_updates": 0, "offline_ratio": 0.0, "subgoal_batch_size": 16, "update_epochs": 1}
    hop.main(make_args("ppo-omg", hindsight_eps=0.8, total_timesteps=5 * 32, run_dir=str(tmp_path), **changes))
    assert shares == pytest.approx([0.8, 0.48, 0.16, 0.0, 0.0], abs=0.05)
    assert shares[3:] == [0, 0]


CLOCKS = {
    "goes": {},
    "stands still": {"time.time": lambda: 5000.0, "time.monotonic": lambda: 5000.0},
    "steps back": {"time.time": itertools.count(10_000, -1).__next__},
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_rows_and_checkpoints_come_as_often_as_asked(clock, monkeypatch, tmp_path):
    for name, function in CLOCKS[clock].items():
        monkeypatch.setattr(name, function)
    saved, save = [], Run.save
    monkeypatch.setattr(Run, "save", lambda run, content: (saved.append(content["iteration"]), save(run, content)))
    for seconds, iterations in ((0.0, [1, 2, 3, 4, 5]), (1000.0, [5])):
        saved.clear()
        flags = {"log_every": 2, "save_seconds": seconds, "total_timesteps": 5 * 32, "run_dir": str(tmp_path)}
        final = hop.main(make_args("ppo", **flags))
        assert [line["steps"] for line in lines_of(Path(final["checkpoint"]).parent)] == [64, 128, 160]
        assert saved == iterations


def test_training_time_goes_on_after_a_resume_without_pictures_and_checkpoints(monkeypatch, tmp_path):
    """On a clock on which an iteration takes 2 s, a picture 100 s, a checkpoint 1000 s"""
    clock = [5000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def takes(seconds, function):
        def call(*given):
            clock[0] += seconds
            return function(*given)

        return call

    slow = [(hop, "train_iteration", 2.0), (hop, "add_histograms", 100.0), (Run, "save", 1000.0)]
    for owner, name, seconds in slow:
        monkeypatch.setattr(owner, name, takes(seconds, getattr(owner, name)))
    flags = {"save_seconds": 0.0, "total_timesteps": 6 * 32, "run_dir": str(tmp_path)}
    save, saved = Run.save, []

    def killed_at_the_fourth(run, content):
        saved.append(run.folders[0])
        if len(saved) == 4:
            raise KeyboardInterrupt
        save(run, content)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "save", killed_at_the_fourth)
        hop.main(make_args("ppo", **flags))
    hop.main(hop.make_args("ppo", "cpu", resume=str(saved[0])))
    lines = lines_of(saved[0])
    assert [line["time/training"] for line in lines] == pytest.approx([2, 4, 6, 8, 10, 12])
    assert [line["charts/SPS"] for line in lines] == pytest.approx([16] * 6)


# ---------------------------------------------------------------------------------------------------------------------
# While adapting


@pytest.mark.parametrize(("steps", "horizon"), [(1, 2), (2, 2), (3, 3), (4, 4)])
def test_games_that_ended_say_nothing_about_the_horizon(steps, horizon):
    """Of six learners with one game each, five games end after so many steps, with their learners on the board. The
    world model knows all but the third step of the sixth."""
    state = make_state(num_envs=1, num_seeds=2, trust_exact_match=0.5)
    first, _, _ = play(state, 1)
    games = hop.Transitions(*(x[:, :1].expand(-1, 4, *x.shape[2:]).clone() for x in first))
    games.joint.fill_(STAY)
    games.reward.zero_()
    games.next_board.copy_(games.board)
    games.done[:5, steps - 1] = True

    def wrong_in_the_third_step(board, reward, call):
        if call == 2:
            board[5] = wrong(board[5])
        return board, reward

    world = TrueWorld(state.games.env, wrong_in_the_third_step)
    state.networks = state.networks._replace(world=world)
    assert hop.learner_mask(TINY_CONFIG, games.board).all()
    found = adapt.pooled_horizon(SimpleNamespace(script=hop), state, games)
    assert found.tolist() == [horizon] * 6
