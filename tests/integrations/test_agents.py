"""Reinforcement learning: steps that are methods, and several that update parts of the state.

An agent as in jaxrl and its kin, which is a tree and has its step as a method; an `Updater` as in
Haiku's examples, whose method is jitted with `self` static; TD3 as in CleanRL, with a step for the
critics, which returns them in a tuple of their own, and one for the actor and all targets at every
other. CleanRL's gives back the critics whole, all of whose arrays are others then.
"""

from __future__ import annotations

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from integrations.loops import WINDOW, run_both

STEPS, TAU, OPTIONS = 17, 0.05, ocp.CheckpointManagerOptions(save_interval_steps=5)
TX = optax.adam(1e-2)


def net(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def init(seed):
    k1, k2 = jax.random.split(jax.random.key(seed))
    return {
        "w1": jax.random.normal(k1, (6, 24)), "b1": jnp.zeros(24),
        "w2": jax.random.normal(k2, (24, 6)),
    }  # fmt: skip


def batch_at(step):
    rng = np.random.default_rng(step)
    return {n: rng.standard_normal((16, 6), np.float32) for n in ("obs", "reward")}


def loss_of(params, target, batch):
    return jnp.mean((net(params, batch["obs"]) - batch["reward"] - 0.9 * target) ** 2)


class Critic(TrainState):
    target: dict


def critic(seed):
    return Critic.create(apply_fn=None, params=init(seed), target=init(seed), tx=TX)


class Agent(flax.struct.PyTreeNode):
    rng: jax.Array
    critic: Critic

    @jax.jit
    def update(self, batch):
        rng, key = jax.random.split(self.rng)
        obs = batch["obs"] + 0.1 * jax.random.normal(key, batch["obs"].shape)
        target = net(self.critic.target, obs)
        loss, grads = jax.value_and_grad(loss_of)(self.critic.params, target, batch)
        new = self.critic.apply_gradients(grads=grads)
        moved = optax.incremental_update(new.params, new.target, TAU)
        return self.replace(rng=rng, critic=new.replace(target=moved)), {"loss": loss}


def train_agent(directory, gockpt, *, monkeypatch):
    agent = Agent(jax.random.PRNGKey(0), critic(1))
    with (
        gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager,
        monkeypatch.context() as patch,
    ):
        patch.setattr(Agent, "update", manager.wrap(Agent.update))  # new
        for step in range(STEPS):
            agent, info = agent.update(batch_at(step))
            manager.save(step, args=ocp.args.StandardSave(agent))
    return agent, info


class Updater:
    def __init__(self, opt):
        self.opt = opt

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def update(self, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], 0.0, batch)
        updates, opt_state = self.opt.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}, loss


UPDATER = Updater(optax.chain(optax.clip(0.25), TX))


def train_updater(directory, gockpt, **_):
    params = init(0)
    state = {"step": jnp.int32(0), "params": params, "opt_state": UPDATER.opt.init(params)}
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        update = manager.wrap(UPDATER.update)  # new
        for step in range(STEPS):
            state, loss = update(state, batch_at(step))
            manager.save(step, args=ocp.args.StandardSave(state))
    return state, loss


@jax.jit
def update_critics(actor, qf1, qf2, batch):
    action = net(actor.target, batch["obs"])
    target = jnp.minimum(net(qf1.target, action), net(qf2.target, action))
    losses, grads = zip(
        *(jax.value_and_grad(loss_of)(qf.params, target, batch) for qf in (qf1, qf2)), strict=True
    )
    return tuple(
        qf.apply_gradients(grads=g) for qf, g in zip((qf1, qf2), grads, strict=True)
    ), losses


@jax.jit
def update_actor(actor, qf1, qf2, obs):
    grads = jax.grad(lambda p: -net(qf1.params, net(p, obs)).mean())(actor.params)
    actor = actor.apply_gradients(grads=grads)
    return (
        actor.replace(target=optax.incremental_update(actor.params, actor.target, TAU)),
        *(optax.incremental_update(qf.params, qf.target, TAU) for qf in (qf1, qf2)),
    )


def train_td3(directory, gockpt, *, whole=False, **_):
    actor, qf1, qf2 = critic(1), critic(2), critic(3)
    with gockpt.GoCkptManager(directory, options=OPTIONS, window=WINDOW) as manager:
        update = manager.wrap(update_critics, state=("qf1", "qf2"))  # new: the larger part
        for step in range(STEPS):
            batch = batch_at(step)
            (qf1, qf2), losses = update(actor, qf1, qf2, batch)
            if step % 2 == 0:  # was: actor, (qf1, qf2) = update_actor(...), the critics as a whole
                actor, target1, target2 = update_actor(actor, qf1, qf2, batch["obs"])
                qf1, qf2 = qf1.replace(target=target1), qf2.replace(target=target2)  # new
                if whole:
                    qf1, qf2 = jax.tree.map(jnp.copy, (qf1, qf2))
            manager.save(step, args=ocp.args.StandardSave((actor, qf1, qf2)))
    return (actor, qf1, qf2), losses


def test_what_goes_through_another_function_is_copied_again(tmp_path):
    run = run_both(functools.partial(train_td3, whole=True), tmp_path)
    assert run.windows == [5, 15]  # in 10 nothing is left of what had left
    assert "nothing given to `save` had left early" in run.manager.reports[2].reason


@pytest.mark.parametrize("train", [train_agent, train_updater, train_td3])
def test_agents(train, tmp_path, monkeypatch):
    run = run_both(train, tmp_path, monkeypatch=monkeypatch)
    assert (run.snapshots, run.windows) == ([0], [5, 10, 15])
