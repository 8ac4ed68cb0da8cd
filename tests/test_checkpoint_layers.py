"""A policy on somebody else's layers: per instance, undoable, and an error where it cannot work."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from oomguard.config.policy import CheckpointPolicy
from oomguard.errors import InputError
from oomguard.model.checkpoint import checkpoint_layers

POLICIES = ["every", "stride=2", "stride=3", "stride=sqrt", "blocks=2", "attention", "custom_function"]
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


class Layer(nn.Module):
    """A layer with a mask, a keyword argument and dropout from the global random state."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def __call__(self, x: mx.array, mask: mx.array, *, scale: float = 1.0) -> mx.array:
        return x + self.dropout(mx.tanh(self.inner(x)) * mask) * scale


class Stack(nn.Module):
    def __init__(self, n_layers: int, width: int = 8):
        super().__init__()
        self.layers = [Layer(width) for _ in range(n_layers)]

    def __call__(self, x: mx.array) -> mx.array:
        mask = mx.arange(x.shape[-1]) < 6
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, scale=1.0 / (i + 1))
        return x


def gradients_of(model: nn.Module, x: mx.array, compiled: bool = False) -> dict[str, mx.array]:
    def loss(x: mx.array) -> mx.array:
        return mx.square(model(x).astype(mx.float32)).mean()

    value_and_grad = nn.value_and_grad(model, loss)
    if compiled:
        value_and_grad = mx.compile(
            value_and_grad, inputs=[model.state, mx.random.state], outputs=[model.state, mx.random.state]
        )
    mx.random.seed(5)
    _, gradients = value_and_grad(x)
    mx.eval(gradients)
    return dict(tree_flatten(gradients))


def assert_equal(got: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = mx.abs(gradient).max().item()
        assert mx.abs(got[name] - gradient).max().item() <= 4e-6 * scale, name


@pytest.fixture
def stack() -> Stack:
    mx.random.seed(1)
    return Stack(5)


@pytest.fixture
def x() -> mx.array:
    return mx.random.normal((2, 3, 8), key=mx.random.key(2))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "attention"])
def test_layers_drawing_global_random_numbers_keep_their_gradients(
    policy: str, compiled: bool, stack: Stack, x: mx.array
) -> None:
    expected = gradients_of(stack, x, compiled)
    with checkpoint_layers(stack.layers, policy):
        assert_equal(gradients_of(stack, x, compiled), expected)


def lm_model(kind: str) -> nn.Module:
    shape = {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 40,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    if kind == "llama":
        from mlx_lm.models import llama as module
    else:
        from mlx_lm.models import qwen3 as module
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(shape))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_of_an_mlx_lm_model_keep_their_gradients(kind: str, policy: str) -> None:
    model = lm_model(kind)
    expected = gradients_of(model, TOKENS)
    with checkpoint_layers(model.layers, policy):
        assert_equal(gradients_of(model, TOKENS), expected)
        assert_equal(gradients_of(model, TOKENS, compiled=True), expected)


@pytest.mark.parametrize("policy", ["every", "stride=2", "attention"])
def test_layers_with_lora_on_quantized_weights_train_only_the_adapters(policy: str) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = lm_model("llama")
    nn.quantize(model, group_size=32, bits=4)
    model.freeze()
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 10.0, "dropout": 0.1})
    expected = gradients_of(model, TOKENS)
    assert all("lora" in name for name in expected)
    with checkpoint_layers(model.layers, policy):
        assert_equal(gradients_of(model, TOKENS), expected)


@pytest.mark.parametrize("policy", ["every", "stride=2", "attention"])
def test_layers_generate_with_a_cache_while_checkpointed(policy: str) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = lm_model("llama")
    expected = model(TOKENS)
    with checkpoint_layers(model.layers, policy):
        cache = make_prompt_cache(model)
        first = model(TOKENS[:, :5], cache=cache)
        rest = model(TOKENS[:, 5:], cache=cache)
    assert cache[0].offset == 8
    assert mx.allclose(mx.concatenate([first, rest], axis=1), expected, atol=1e-5)


def test_layers_are_wrapped_one_by_one_and_no_class_is_changed(stack: Stack, x: mx.array) -> None:
    other = copy.deepcopy(stack)
    call = Layer.__call__
    names = [name for name, _ in tree_flatten(stack.parameters())]
    handle = checkpoint_layers(stack.layers, "blocks=2")
    assert Layer.__call__ is call
    assert [type(layer) is Layer for layer in stack.layers] == [False, False, True, True, True]
    assert all(isinstance(layer, Layer) for layer in stack.layers)
    assert all(type(layer) is Layer for layer in other.layers)
    assert [name for name, _ in tree_flatten(stack.parameters())] == names
    assert len(handle.segments) == 2


def test_layers_undone_are_as_they_were(stack: Stack, x: mx.array) -> None:
    expected = gradients_of(stack, x)
    before = repr(stack)
    handle = checkpoint_layers(stack.layers, "stride=2")
    handle.undo()
    handle.undo()
    assert all(type(layer) is Layer for layer in stack.layers)
    assert repr(stack) == before
    assert mx.fast.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    assert_equal(gradients_of(stack, x), expected)


def test_layers_undo_when_leaving_the_context_even_by_an_error(stack: Stack) -> None:
    with pytest.raises(RuntimeError), checkpoint_layers(stack.layers, "every"):
        raise RuntimeError
    assert all(type(layer) is Layer for layer in stack.layers)


def test_layers_keep_their_own_parameters_after_a_gradient(stack: Stack, x: mx.array) -> None:
    with checkpoint_layers(stack.layers, "stride=2"):
        before = [parameter for _, parameter in tree_flatten(stack.parameters())]
        mx.grad(lambda x: stack(x).sum())(x)
        after = [parameter for _, parameter in tree_flatten(stack.parameters())]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_layers_wrapped_twice_are_refused(stack: Stack) -> None:
    handle = checkpoint_layers(stack.layers, "blocks=1")
    with pytest.raises(InputError, match=r"layer 0 \(Layer\) is already checkpointed"):
        checkpoint_layers(stack.layers, "every")
    handle.undo()
    checkpoint_layers(stack.layers, "every").undo()


def test_layers_that_are_no_modules_or_shared_are_refused(stack: Stack) -> None:
    with pytest.raises(InputError, match=r"layer 1 is a function, not an mlx\.nn\.Module"):
        checkpoint_layers([stack.layers[0], lambda x: x], "every")  # type: ignore[list-item]
    with pytest.raises(InputError, match="layers 0 and 1 are the same object"):
        checkpoint_layers([stack.layers[0], stack.layers[0]], "stride=2")
    with pytest.raises(InputError, match="'all' is not a checkpoint policy"):
        checkpoint_layers(stack.layers, "all")
    assert all(type(layer) is Layer for layer in stack.layers)


def test_layers_without_attention_refuse_the_attention_policy(stack: Stack, x: mx.array) -> None:
    with (
        checkpoint_layers(stack.layers, "attention"),
        pytest.raises(InputError, match=r"layer 0 \(Layer\) makes no call of mx.fast.scaled_dot_product"),
    ):
        stack(x)
    assert mx.fast.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_layers_with_work_between_them_refuse_a_segment(x: mx.array) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    with checkpoint_layers(layers, "stride=3"):
        out = layers[0](x)
        with pytest.raises(InputError, match="layer 1 was not handed what layer 0 returned"):
            layers[1](out * 2)
        with pytest.raises(InputError, match="layer 2 was not handed what layer 1 returned"):
            layers[2](x)
        assert not mx.isnan(layers[2](layers[1](layers[0](x)))).any()


def test_layers_read_inside_a_segment_give_nan_not_a_wrong_number(x: mx.array) -> None:
    layers = [nn.Linear(8, 8) for _ in range(2)]
    with checkpoint_layers(layers, "stride=2"):
        assert mx.isnan(layers[0](x)).all()


class Pair(nn.Module):
    def __call__(self, x: mx.array) -> Any:
        return x, x


def test_layers_returning_more_than_one_array_work_alone_and_refuse_a_segment(x: mx.array) -> None:
    layers = [Pair(), Pair()]
    with checkpoint_layers(layers, "every"):
        a, b = layers[0](x)
        assert mx.array_equal(a, b)
    with (
        checkpoint_layers(layers, "stride=2"),
        pytest.raises(InputError, match="layer 0 returns a tuple, and a segment of several layers"),
    ):
        layers[1](layers[0](x))
    with (
        checkpoint_layers(layers, "custom_function"),
        pytest.raises(InputError, match="custom_function needs layers that return one array"),
    ):
        layers[0](x)


def test_layers_of_integers_refuse_a_segment() -> None:
    layers = [nn.Embedding(4, 8), nn.Linear(8, 8)]
    with (
        checkpoint_layers(layers, "stride=2"),
        pytest.raises(InputError, match="layer 0 needs an array of floats as its first argument"),
    ):
        layers[0](mx.array([1, 2]))


def test_layers_take_an_empty_list_and_a_policy_value() -> None:
    assert checkpoint_layers([], "every").segments == ()
    layers = [nn.Linear(2, 2)]
    assert checkpoint_layers(layers, CheckpointPolicy(policy="none")).segments == ()
    assert type(layers[0]) is nn.Linear
