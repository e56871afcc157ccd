"""What the cut is measured on: optax's optimizers on an MLP and on a transformer in bf16."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

RATE = 1e-2

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(RATE),
    "adadelta": lambda: optax.adadelta(RATE),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=16),
    "adagrad": lambda: optax.adagrad(RATE),
    "adam": lambda: optax.adam(RATE),
    "adam, l2": lambda: optax.chain(optax.add_decayed_weights(0.01), optax.adam(RATE)),
    "adamax": lambda: optax.adamax(RATE),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(RATE, 100)),
    "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE)),
    "adamw, multisteps": lambda: optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
    "adan": lambda: optax.adan(RATE),
    "amsgrad": lambda: optax.amsgrad(RATE),
    "dowg": lambda: optax.contrib.dowg(1.0),
    "fromage": lambda: optax.fromage(RATE),
    "lamb": lambda: optax.lamb(RATE, weight_decay=0.1),
    "lars": lambda: optax.lars(RATE, weight_decay=0.1),
    "lion": lambda: optax.lion(RATE / 10),
    "muon": lambda: optax.contrib.muon(RATE, ns_steps=3),
    "nadam": lambda: optax.nadam(RATE),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=0),
    "novograd": lambda: optax.novograd(RATE),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(RATE),
    "prodigy": lambda: optax.contrib.prodigy(),
    "radam": lambda: optax.radam(RATE),
    "rmsprop": lambda: optax.rmsprop(RATE),
    "rmsprop, centered": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(RATE, warmup_steps=2),
    "sgd": lambda: optax.sgd(RATE),
    "sgd, momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "sgd, nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "sign_sgd": lambda: optax.sign_sgd(RATE / 10),
    "sm3": lambda: optax.sm3(RATE),
    "yogi": lambda: optax.yogi(RATE),
}
QUICK = ("adam, l2", "adamw, clipped", "lamb", "lion", "sgd, momentum")

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, BATCH = 32, 4, 2, 67, 16, 8


def _normal(key: Any, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5


def init_mlp(widths: Sequence[int] = (20, 48, 40, 32, 7)) -> Any:
    """Four layers of uneven widths."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    return {
        f"layer{i}": {"kernel": _normal(keys[i], a, b), "bias": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    }


def mlp_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Cross entropy of labels that can be learnt; fp32 throughout."""
    h = jnp.sin(tokens[:, :1].astype(jnp.float32) * jnp.arange(1.0, 21.0))
    for i in range(4):
        h = h @ params[f"layer{i}"]["kernel"] + params[f"layer{i}"]["bias"]
        h = jax.nn.gelu(h) if i < 3 else h
    return optax.softmax_cross_entropy_with_integer_labels(h, tokens[:, 0] % 7).mean()


def init_transformer() -> Any:
    """Pre-norm blocks, tied embedding."""
    keys = iter(jax.random.split(jax.random.key(0), 2 + 4 * LAYERS))
    params: dict[str, Any] = {
        "tokens": _normal(next(keys), VOCABULARY, WIDTH),
        "positions": _normal(next(keys), LENGTH, WIDTH),
        "norm": jnp.ones(WIDTH),
    }
    for i in range(LAYERS):
        params[f"block{i}"] = {
            "norm1": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
            "qkv": {"kernel": _normal(next(keys), WIDTH, 3 * WIDTH), "bias": jnp.zeros(3 * WIDTH)},
            "out": {"kernel": _normal(next(keys), WIDTH, WIDTH)},
            "norm2": {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)},
            "up": {"kernel": _normal(next(keys), WIDTH, 4 * WIDTH), "bias": jnp.zeros(4 * WIDTH)},
            "down": {"kernel": _normal(next(keys), 4 * WIDTH, WIDTH), "bias": jnp.zeros(WIDTH)},
        }
    return params


def _norm(x: jax.Array, p: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-6)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def _dense(x: jax.Array, p: Any) -> jax.Array:
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def transformer_loss(params: Any, tokens: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Next-token cross entropy; parameters in fp32, matrix products in `dtype`."""
    table = params["tokens"].astype(dtype)
    x = table[tokens] + params["positions"].astype(dtype)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        p = params[f"block{i}"]
        q, k, v = jnp.split(_dense(_norm(x, p["norm1"]), p["qkv"]), 3, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1).swapaxes(1, 2) for t in (q, k, v))
        scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9)).astype(x.dtype)
        x = x + _dense((weights @ v).swapaxes(1, 2).reshape(x.shape), p["out"])
        x = x + _dense(jax.nn.gelu(_dense(_norm(x, p["norm2"]), p["up"])), p["down"])
    x = _norm(x, {"scale": params["norm"], "bias": 0.0})
    logits = (x @ table.T).astype(jnp.float32)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


MODELS = {
    "mlp": (init_mlp, mlp_loss),
    "wide mlp": (functools.partial(init_mlp, (20, 640, 512, 384, 7)), mlp_loss),
    "transformer": (init_transformer, transformer_loss),
    "transformer, fp32": (
        init_transformer,
        functools.partial(transformer_loss, dtype=jnp.float32),
    ),
}


def make_step(optimizer: str, model: str) -> tuple[Any, Callable[[], Any]]:
    """A donating train step `(state, batch) -> (state, loss)`, and a maker of its first state."""
    init, loss_of = MODELS[model]
    tx = OPTIMIZERS[optimizer]()

    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def first() -> Any:
        params = init()
        return params, tx.init(params)

    return jax.jit(step, donate_argnums=0), jax.jit(first)


def batch(n: int) -> jax.Array:
    """Batch `n`."""
    return jax.random.randint(jax.random.key(n), (BATCH, LENGTH), 0, VOCABULARY)
