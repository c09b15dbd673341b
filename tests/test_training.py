"""hopplus_ppo.py: what each flag changes, the preparation, and what falls in the course of a run"""

import dataclasses
import functools
from unittest import mock

import hopplus_ppo as hop

import pytest
import torch
from helpers import TINY_CONFIG, lines_of, record_learning_rates, resume, same_tree, train_tiny, without_times
from tiny_hopplus import encode, make_args, make_state, train

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


# ---- The preparation
def prepared(**changes):
    """All weights after it"""
    state = make_state(num_seeds=2, **changes)
    hop.pretrain(state, 0)
    return state.state_dict()["networks"]


def test_the_preparation_trains_every_model_with_a_falling_learning_rate(monkeypatch):
    """Each learner starts from a copy of its seed's. The first rate of each model is twice the second, and all updates
    that were asked for are made"""
    before = prepared(pretraining_updates=0)
    rates = record_learning_rates(monkeypatch)
    after = prepared(pretraining_updates=21)
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


def test_the_preparation_watches_as_many_games_as_asked():
    few, many = (prepared(method="ppo-omg", pretraining_updates=1, pretraining_games=n)["moa"] for n in (2, 8))
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
    """Five iterations"""
    train_iteration, shares = hop.train_iteration, []

    def watched(state):
        shares.append(float(state.eps))
        return train_iteration(state)

    monkeypatch.setattr(hop, "train_iteration", watched)
    train_tiny(tmp_path, "ppo-omg", hindsight_eps=0.8, total_timesteps=5 * 32, pretraining_updates=0)
    assert shares == pytest.approx([0.8, 0.48, 0.16, 0.0, 0.0])


def test_new_games_are_watched_as_often_as_the_replay_is_filled(tmp_path):
    """Whatever --log-every says. Seven iterations"""
    with mock.patch.object(hop, "rollout", wraps=hop.rollout) as rollout:
        train_tiny(tmp_path, "ppo-omg", total_timesteps=7 * 32, replay_rollouts=3, log_every=2, pretraining_updates=1)
    calls = [call.args for call in rollout.call_args_list]
    played = ["preparation" if state.pretraining else games is state.watched for state, games in calls]
    assert played == ["preparation", True, True, True, *[True, False, False, False] * 2, True, False]


def test_rows_and_checkpoints_come_as_often_as_asked(tmp_path):
    """Rows are means over the iterations since the last one; a checkpoint between two does not change them"""
    rows = []
    for seconds, iterations in ((0.0, [1, 2, 3, 4, 5]), (1000.0, [5])):
        flags = {"log_every": 2, "save_seconds": seconds, "total_timesteps": 5 * 32}
        with mock.patch.object(hop, "save_checkpoint", wraps=hop.save_checkpoint) as save:
            (folder,) = train_tiny(tmp_path, "ppo", **flags)
        assert [call.args[3]["iteration"] for call in save.call_args_list] == iterations
        rows.append(without_times(lines_of(folder)))
    assert [row["steps"] for row in rows[0]] == [64, 128, 160] and rows[0] == rows[1]


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
    save = hop.save_checkpoint
    killed_at_the_fourth = mock.Mock(side_effect=[mock.DEFAULT] * 3 + [KeyboardInterrupt], wraps=save)
    with mock.patch.object(hop, "save_checkpoint", killed_at_the_fourth), pytest.raises(KeyboardInterrupt):
        train_tiny(tmp_path, "ppo", save_seconds=0.0, total_timesteps=6 * 32)
    (folder,) = tmp_path.iterdir()
    resume(hop, folder)
    lines = lines_of(folder)
    assert [line["time/training"] for line in lines] == pytest.approx([2, 4, 6, 8, 10, 12])
    assert [line["time/SPS"] for line in lines] == pytest.approx([16] * 6)
