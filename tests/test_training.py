"""hopplus_ppo.py: what each flag changes, the preparation, and what falls in the course of a run"""

import copy
import dataclasses
import functools
import itertools

import hopplus_ppo as hop

import pytest
import torch
from helpers import TINY_CONFIG, lines_of, record_learning_rates, same_tree, train_tiny
from test_runs import resume
from tiny_hopplus import encode, make_args, make_state, train, watch_networks

# ---- What each flag changes

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
def learned(method, **changes):
    """All weights after one iteration"""
    state = make_state(method, **{**FAST, **changes})
    train(state)
    return state.state_dict()["networks"]


@pytest.mark.parametrize(("method", "base", "name", "value"), CASES, ids=[case[2] for case in CASES])
def test_a_flag_changes_what_is_learned(method, base, name, value):
    plain, changed = learned(method, **base), learned(method, **base, **{name: value})
    assert getattr(make_args(method, **{**FAST, **base}), name) != value
    shapes, new_shapes = ({key: [p.shape for p in x.values()] for key, x in y.items()} for y in (plain, changed))
    assert shapes != new_shapes or not same_tree(plain, changed), f"{name} changes nothing"


def test_every_flag_changes_something():
    flags = {field.name for field in dataclasses.fields(hop.Args)} - {"config"}
    assert flags == {case[2] for case in CASES} | ELSEWHERE


def watch(state):
    if state.watched is not None:
        state.watched.push(hop.rollout(state, state.watched)[0])


@pytest.mark.parametrize("method", hop.METHODS)
def test_a_state_that_is_put_back_learns_the_same_again(method):
    """As before a CUDA graph is recorded: also where the replay was empty, and everything in place"""
    state, ends = make_state(method, num_envs=8, seats="learner,mixed,learner"), []
    watch(state)
    before = copy.deepcopy(state.state_dict())
    assert before["games"]["replay"] == {}
    for _ in range(2):
        for _ in range(2):
            train(state)
        watch(state)
        ends.append(copy.deepcopy(state.state_dict()))
        weights = [*state.networks["policy"].params.values()]
        state.load_state_dict(before)
        assert all(x is y for x, y in zip(weights, state.networks["policy"].params.values(), strict=True))
    assert same_tree(*ends) and not same_tree(before["networks"], ends[0]["networks"])
    assert same_tree(state.state_dict()["networks"], before["networks"])
    assert same_tree(state.env.state_dict(), before["games"]["env"])


# ---- The preparation


def prepared(monkeypatch, **changes):
    """All weights after it, and those of the model that only it needs"""
    made, init = [], hop.TrainState.__init__

    def watched(state, *given, **named):
        init(state, *given, **named)
        made.append(state)

    with monkeypatch.context() as patch:
        patch.setattr(hop.TrainState, "__init__", watched)
        state = make_state(num_seeds=2, **changes)
        hop.pretrain(state, 0)
    assert made[0] is state and "moa_prior" not in state.networks
    teacher = made[1]
    return copy.deepcopy(state.state_dict()["networks"]), teacher.networks["moa_prior"].state_dict()


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
    hop.pretrain(state, 0)
    replay = state.watched.replay
    both = {name: torch.cat([x[0], x[1]], 1) for name, x in replay.items() if name != "history"}
    both["history"] = replay["history"][0]
    done = both["done"].long()
    both["game_number"] = done.cumsum(1) - done
    expected = encode(state, both)[:, state.args.num_steps]
    found = replay["history"][1][:, 0].float()
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)  # half precision


# ---- What falls in the course of a run


def test_learning_rates_of_a_run(monkeypatch, tmp_path):
    """The policy's falls to a tenth, unless asked not to; those of the models stay. Four iterations"""
    rates = record_learning_rates(monkeypatch)
    flags = {"learning_rate": 0.01, "subgoal_learning_rate": 2e-3, "wm_learning_rate": 3e-3}
    flags |= {"update_epochs": 1, "num_minibatches": 1, "subgoal_updates": 1, "wm_updates": 1}
    flags |= {"pretraining_updates": 0, "offline_ratio": 0.0, "total_timesteps": 4 * 32}
    train_tiny(tmp_path, **flags)
    found = sorted(rates, key=lambda x: x[0])
    falling = [0.01, 0.00775, 0.0055, 0.00325]
    assert found == [pytest.approx(x) for x in ([2e-3] * 4, [3e-3] * 4, falling)]
    rates.clear()
    train_tiny(tmp_path, "ppo", anneal_lr=False, **flags)
    assert rates == [pytest.approx([0.01] * 4)]


def test_hindsight_falls_to_nothing_halfway(monkeypatch, tmp_path):
    """MOA reads hindsight subgoals in as large a share of its training as asked at the start. Five iterations"""
    train_iteration, shares = hop.train_iteration, []

    def watched(state):
        prior = state.networks["prior"].params
        prior["head.weight"].data.zero_()  # f_psi says 7 of every state, and so does hindsight
        prior["head.bias"].data.fill_(7.0)
        (moa,) = watch_networks(state, "moa")
        samples = train_iteration(state)
        goals = torch.cat([inputs[2] for _, inputs in moa.given], 1)
        shares.append(float((goals == 7).all(2).float().mean()))
        state.networks["moa"] = moa.stacked
        return samples

    monkeypatch.setattr(hop, "train_iteration", watched)
    changes = {"pretraining_updates": 0, "offline_ratio": 0.0, "subgoal_batch_size": 16, "update_epochs": 1}
    train_tiny(tmp_path, "ppo-omg", hindsight_eps=0.8, total_timesteps=5 * 32, **changes)
    assert shares == pytest.approx([0.8, 0.48, 0.16, 0.0, 0.0], abs=0.05)
    assert shares[3:] == [0, 0]


def test_new_games_are_watched_as_often_as_the_replay_is_filled(monkeypatch, tmp_path):
    """Whatever --log-every says. Seven iterations"""
    rollout, played = hop.rollout, []

    def watched(state, games):
        kind = "preparation" if state.pretraining else "watched" if games is state.watched else "own"
        played.append(kind)
        return rollout(state, games)

    monkeypatch.setattr(hop, "rollout", watched)
    train_tiny(tmp_path, "ppo-omg", total_timesteps=7 * 32, replay_rollouts=3, log_every=2, pretraining_updates=1)
    assert played[:4] == ["preparation", *["watched"] * 3]
    assert played[4:] == ["watched", "own", "own", "own"] * 2 + ["watched", "own"]


CLOCKS = {
    "goes": {},
    "stands still": {"time.time": lambda: 5000.0},
    "steps back": {"time.time": itertools.count(10_000, -1).__next__},
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_rows_and_checkpoints_come_as_often_as_asked(clock, monkeypatch, tmp_path):
    for name, function in CLOCKS[clock].items():
        monkeypatch.setattr(name, function)
    saved, save = [], hop.save_checkpoint

    def watched(path, rank, state, progress):
        saved.append(progress["iteration"])
        save(path, rank, state, progress)

    monkeypatch.setattr(hop, "save_checkpoint", watched)
    for seconds, iterations in ((0.0, [1, 2, 3, 4, 5]), (1000.0, [5])):
        saved.clear()
        flags = {"log_every": 2, "save_seconds": seconds, "total_timesteps": 5 * 32}
        (folder,) = train_tiny(tmp_path, "ppo", **flags)
        assert [line["steps"] for line in lines_of(folder)] == [64, 128, 160]
        assert saved == iterations


def test_a_checkpoint_between_two_rows_does_not_change_them(tmp_path):
    """Rows are means over the iterations since the last one"""
    rows = []
    for seconds in (0.0, 1000.0):
        flags = {"log_every": 2, "save_seconds": seconds, "total_timesteps": 4 * 32}
        (folder,) = train_tiny(tmp_path / str(seconds), "ppo", **flags)
        rows.append([line["real/return_mean"] for line in lines_of(folder)])
    assert rows[0] == rows[1] and len(rows[0]) == 2


def test_training_time_goes_on_after_a_resume_without_pictures_and_checkpoints(monkeypatch, tmp_path):
    """On a clock on which an iteration takes 2 s, a row in the logs 100 s, a checkpoint 1000 s"""
    clock = [5000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def takes(seconds, function):
        def call(*given):
            clock[0] += seconds
            return function(*given)

        return call

    for name, seconds in (("train_iteration", 2.0), ("log", 100.0), ("save_checkpoint", 1000.0)):
        monkeypatch.setattr(hop, name, takes(seconds, getattr(hop, name)))
    save, saved = hop.save_checkpoint, []

    def killed_at_the_fourth(path, *given):
        saved.append(path.parent)
        if len(saved) == 4:
            raise KeyboardInterrupt
        save(path, *given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hop, "save_checkpoint", killed_at_the_fourth)
        train_tiny(tmp_path, "ppo", save_seconds=0.0, total_timesteps=6 * 32)
    resume(saved[0])
    lines = lines_of(saved[0])
    assert [line["time/training"] for line in lines] == pytest.approx([2, 4, 6, 8, 10, 12])
    assert [line["charts/SPS"] for line in lines] == pytest.approx([16] * 6)
