"""The paper, statement by statement: one test an equation or table. Where a claim does not hold,
the test says what does.
"""

import math

import planted
import pytest
import torch

from bitimely_core import heads, models, objectives, registry
from bitimely_core.config import build_model_config, load_preset
from bitimely_core.errors import UserError
from bitimely_core.ops.retention import retention, retention_matrix
from bitimely_core.ops.rotary import rotate
from bitimely_core.types import Batch

torch.set_num_threads(1)

GAMMA = torch.tensor([0.9, 0.97], dtype=torch.float64)


def qkv(batch=1, count=12, heads=2, width=4, values=6):
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, count, heads, w, generator=draw, dtype=torch.float64)
        for w in (width, width, values)
    )


def by_loops(q, k, v, allowed):
    """sum over allowed m of K^(-1/2) (q_n . k_m) gamma^|n - m| v_m, one number at a time."""
    out = torch.zeros_like(v)
    for h in range(q.shape[2]):
        for n in range(q.shape[1]):
            for m in range(q.shape[1]):
                if allowed(n, m):
                    out[0, n, h] += (
                        (q[0, n, h] @ k[0, m, h])
                        / math.sqrt(q.shape[3])
                        * GAMMA[h] ** abs(n - m)
                        * v[0, m, h]
                    )
    return out


def tiny(name="bitimelygpt", **options):
    return planted.tiny(name, **{"channels": 2, "length": 40, **options}).double()


def signal(rows=1, length=40, channels=2):
    return Batch(
        torch.randn(
            rows, length, channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
    )


# -------------------------------------------------------------------------------------------------------------- related work


def test_eq1_attention_is_a_softmax_over_all_tokens():
    model = tiny("gpt")
    maps = model(signal(), directions=["both"] * 4, attention=True).attention
    mix, layer = model.layers[0].mix, model.layers[0]
    tokens = model.adapter.embed(model.adapter.tokenizer(signal())[0])
    x = layer.norm_mix(
        torch.cat((model.special[:1], tokens[0], model.special[1:])) + model.positions
    )
    q, k, _ = (t.reshape(12, 4, 16) for t in mix.qkv(x).chunk(3, -1))
    wanted = (torch.einsum("nhk,mhk->hnm", q, k) / math.sqrt(16)).softmax(-1)
    torch.testing.assert_close(maps[0][0], wanted)


def test_eq2_causal_attention_excludes_the_future_instead_of_multiplying_by_zero():
    """As printed, the mask multiplies the logits inside the softmax: a masked one would count as
    exp(0). Here it is excluded.
    """
    for map_ in tiny("gpt")(signal(), attention=True).attention:
        assert torch.equal(map_, map_.tril())
        assert (map_[0, :, 0, 0] == 1).all()  # the first token attends to itself alone
        torch.testing.assert_close(map_.sum(-1), torch.ones_like(map_[..., 0]))


def test_eq3_rotation_and_decay_depend_on_the_distance_alone():
    """q_n k_m = x_n W_Q (gamma e^(i theta))^(n - m) (x_m W_K)^T, as complex numbers."""
    q, k, _ = qkv(count=1)
    for n, m in ((0, 0), (5, 2), (3, 9), (105, 102)):
        ours = (rotate(q, torch.tensor([n])) * rotate(k, torch.tensor([m]))).sum(-1)[0, 0]
        theta = 10000.0 ** (-torch.tensor([0.0, 2.0], dtype=torch.float64) / 4)
        a, b = (torch.view_as_complex(t.reshape(2, 2, 2)) for t in (q[0, 0], k[0, 0]))
        wanted = (
            a * torch.polar(torch.ones(2, dtype=torch.float64), theta * (n - m)) * b.conj()
        ).real.sum(-1)
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


def test_eq4_forward_retention_is_lower_triangular_with_decay():
    q, k, v = qkv()
    R = retention_matrix(q, k, log_decay=GAMMA.log())
    assert torch.equal(R, R.tril())
    ours = retention(q, k, v, log_decay=GAMMA.log())
    torch.testing.assert_close(ours, by_loops(q, k, v, lambda n, m: n >= m), rtol=1e-10, atol=1e-10)


def test_eq5_the_recurrent_form_is_the_same():
    q, k, v = qkv()
    state, rows = torch.zeros(2, 4, 6, dtype=torch.float64), []
    for n in range(q.shape[1]):
        state = GAMMA[:, None, None] * state + k[0, n, :, :, None] * v[0, n, :, None, :]
        rows.append((q[0, n, :, None, :] @ state)[:, 0] / math.sqrt(4))
    wanted = torch.stack(rows)[None]
    for form in ("parallel", "recurrent", "chunkwise"):
        torch.testing.assert_close(
            retention(q, k, v, log_decay=GAMMA.log(), form=form, chunk=5),
            wanted,
            rtol=1e-10,
            atol=1e-10,
        )


# -------------------------------------------------------------------------------------------------------------- BAAR


def changed(model, token, directions):
    """Positions of the last layer that change with one token."""
    batch = signal()
    other = batch.values.clone()
    other[:, 4 * token] += 1
    a, b = (
        model(batch._replace(values=x), directions=directions).hidden[-1]
        for x in (batch.values, other)
    )
    return (a != b).any(-1)[0].nonzero().flatten().tolist()


def test_eq6_the_forward_model_conditions_on_the_past():
    assert changed(tiny(), 4, ["forward"] * 4) == list(range(5, 12))


def test_eq7_the_backward_model_conditions_on_the_future():
    assert changed(tiny(), 4, ["backward"] * 4) == list(range(6))


def test_eq8_backward_retention_is_upper_triangular_with_decay():
    q, k, v = qkv()
    R = retention_matrix(q, k, log_decay=GAMMA.log(), direction="backward")
    assert torch.equal(R, R.triu())
    ours = retention(q, k, v, log_decay=GAMMA.log(), direction="backward")
    torch.testing.assert_close(ours, by_loops(q, k, v, lambda n, m: n <= m), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["bitimelygpt", "gpt-baar"])
def test_baar_odd_layers_go_forward_and_even_layers_backward(name):
    model = tiny(name, layers=6)
    assert model.directions == ("forward", "backward") * 3
    for number, map_ in enumerate(model(signal(), attention=True).attention, start=1):
        assert torch.equal(map_, map_.tril() if number % 2 else map_.triu())
        assert not torch.equal(map_, map_.triu() if number % 2 else map_.tril())


def test_baar_assumes_an_even_number_of_layers():
    with pytest.raises(UserError, match="even number"):
        tiny(layers=5)


def test_baar_special_tokens_gather_the_sequence_where_the_paper_says():
    """[EOS] in odd layers and [SOS] in even layers have read every token in that layer; the other
    one in the first layer only itself.
    """
    maps = tiny()(signal(), attention=True).attention
    for number, map_ in enumerate(maps, start=1):
        reads_all, reads_itself = (-1, 0) if number % 2 else (0, -1)
        assert (map_[0, :, reads_all] != 0).all()
        assert ((map_[0, :, reads_itself] != 0).sum(-1) == 1).all()


def test_eq9_next_token_at_layer_l_minus_1_and_previous_token_at_layer_l():
    """With the last two layers replaced by an oracle, the loss is 0: position p of layer L - 1
    holds token p, of layer L token p - 2.
    """
    model = tiny()
    batch = signal(rows=3)
    y = batch.values[:, ::4]
    states = torch.zeros(2, 3, 12, 64, dtype=torch.float64)
    states[0, :, :10, :2], states[1, :, 2:, :2] = y, y
    encoded = model(batch)
    model.forward = lambda *args, **kwargs: encoded._replace(hidden=(*encoded.hidden[:2], *states))
    model.output = lambda hidden, which, batch=None: hidden[..., :2]
    result = objectives.get("next-previous")(model, batch)
    assert result["parts"] == {"next": 0.0, "previous": 0.0}
    # the mirror task of a reversed target is not the loss of the paper
    states[1, :, 2:, :2] = y.flip(1)
    assert objectives.get("next-previous")(model, batch)["parts"]["previous"] > 0.5


def test_eq9_is_a_mean_squared_error_for_signals_and_cross_entropy_for_codes():
    model, batch = tiny(), signal(rows=2)
    result, hidden = objectives.get("next-previous")(model, batch), model(batch).hidden
    y = batch.values[:, ::4]
    wanted = (model.output(hidden[2])[:, :10] - y).square().mean() + (
        model.output(hidden[3])[:, 2:] - y
    ).square().mean()
    torch.testing.assert_close(result["loss"], wanted)
    model = tiny(tokenizer="codes", codes=20)
    codes = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(0))
    result, hidden = (
        objectives.get("next-previous")(model, Batch(codes)),
        model(Batch(codes)).hidden,
    )
    classes = torch.cat((codes - 5, torch.full((2, 1), 15)), 1)  # behind the last code stands [EOS]
    wanted = torch.nn.functional.cross_entropy(
        model.output(hidden[2])[:, :8].flatten(0, 1), classes.flatten()
    )
    wanted = wanted + torch.nn.functional.cross_entropy(
        model.output(hidden[3])[:, 2:].flatten(0, 1), classes[:, :7].flatten()
    )
    torch.testing.assert_close(result["loss"], wanted)


def test_eq9_can_see_its_targets():
    """Stated as generative; but a backward layer below a forward one carries the target to its
    reader. The strict form keeps both conditionals.
    """
    own = {}
    for objective in ("next-previous", "next-previous-strict"):
        x = signal().values.requires_grad_()
        prediction = objectives.get(objective)(tiny(), Batch(x))["prediction"]
        slopes = [
            torch.autograd.grad(prediction[0, n].sum(), x, retain_graph=True)[0][0, 4 * (n % 10)]
            .abs()
            .max()
            for n in range(20)
        ]
        own[objective] = torch.stack(slopes)
    assert (own["next-previous"][1:-1] > 0).all()
    assert (own["next-previous-strict"] == 0).all()
    assert registry.objectives["next-previous"].facts.leak_free is False


def test_eq10_two_sided_retention_is_forward_plus_backward_minus_the_diagonal():
    q, k, v = qkv()
    ours = retention(q, k, v, log_decay=GAMMA.log(), direction="both")
    torch.testing.assert_close(ours, by_loops(q, k, v, lambda n, m: True), rtol=1e-10, atol=1e-10)
    both, forward, backward = (
        retention_matrix(q, k, log_decay=GAMMA.log(), direction=d)
        for d in ("both", "forward", "backward")
    )
    torch.testing.assert_close(
        both, forward + backward - torch.diag_embed(both.diagonal(dim1=-2, dim2=-1))
    )
    assert set(tiny("timelybert").directions) == {"both"}


# -------------------------------------------------------------------------------------------------------------- claims


def effective_rank(matrix):
    share = torch.linalg.svdvals(matrix)
    share = share / share.sum(-1, keepdim=True)
    return float(torch.special.entr(share).sum(-1).exp().mean() / matrix.shape[-1])


def test_full_rank_is_true_and_says_little():
    """det R is the product of the diagonal, not 0 for almost all weights; but it is tiny, and the
    two-sided matrix has full rank too.
    """
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 64, 2, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    R = {
        d: retention_matrix(q, k, log_decay=GAMMA.log(), direction=d)
        for d in ("forward", "backward", "both")
    }
    for direction in ("forward", "backward"):
        sign, logarithm = torch.linalg.slogdet(R[direction])
        assert (sign != 0).all()
        diagonal = R[direction].diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        # so ill-conditioned that LU loses all but two digits
        torch.testing.assert_close(logarithm, diagonal, rtol=0.05, atol=0)
        assert (logarithm < -50).all()
    assert (torch.linalg.matrix_rank(R["both"]) == 64).all()
    product = torch.einsum("bnhk,bmhk->bhnm", q, k)
    # most of it is the triangular mask
    assert effective_rank(R["forward"]) > effective_rank(R["both"]) > effective_rank(product)


def test_table1_data_preservation():
    """Generative pre-training reads the data as they are; masking sets 40 % of them to 0."""
    for objective, altered in (
        ("next-previous", 0),
        ("next-previous-strict", 0),
        ("gap", 0),
        ("masked", 0.4),
    ):
        model, seen = tiny(length=200), []
        model.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].values))
        objectives.get(objective)(model, signal(length=200), torch.Generator().manual_seed(0))
        assert all(
            float((values == 0).double().mean()) == pytest.approx(altered, abs=0.001)
            for values in seen
        )


def test_table1_bidirectionality():
    """Which tokens the sequence vector of each model depends on: all of them, for every model, at
    its own readout.
    """
    for name in ("bitimelygpt", "timelygpt", "timelybert", "gpt", "gpt-baar"):
        head = heads.Classifier(tiny(name), outputs=2).double().eval()
        x = signal().values.requires_grad_()
        (slope,) = torch.autograd.grad(head(Batch(x)).sum(), x)
        assert (slope[0, ::4].abs().amax(-1) > 0).all()
    # a forward [SOS] has seen nothing
    blind = heads.Classifier(tiny("timelygpt"), outputs=2, readout="sos").double().eval()
    assert torch.equal(blind(signal()), blind(Batch(signal().values + 1)))


# -------------------------------------------------------------------------------------------------------------- appendix


@pytest.mark.parametrize(
    ("steps", "tokens"),
    [(3000, 750), (5000, 1250), (178, 45), (1500, 375), (256, 64), (1000, 250), (4000, 1000)],
)
def test_appendix_the_tokenizer_reduces_the_length_to_a_quarter(steps, tokens):
    """N = T / 4 as two stride-2 convolutions give it: rounded up."""
    torch.manual_seed(0)
    model = planted.tiny("bitimelygpt", channels=2, length=steps, layers=2)
    encoded = model(Batch(torch.randn(1, steps, 2)))
    assert encoded.tokens.shape == encoded.targets.shape == (1, tokens, 2)  # N x V
    assert encoded.hidden[-1].shape == (1, tokens + 2, 64)  # (N + 2) x d with [SOS] and [EOS]
    assert tokens == math.ceil(steps / 4)


def test_figures_use_patches_of_eight():
    model = tiny(tokenizer="patch", length=3000, layers=2)
    assert model(signal(length=3000)).tokens.shape == (1, 375, 16)


def test_appendix_chunks_of_any_size_give_the_same():
    wanted = tiny(form="parallel")(signal(length=100)).hidden[-1]
    for chunk in (3, 8, 64):
        ours = tiny(form="chunkwise", chunk=chunk)(signal(length=100)).hidden[-1]
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


# decoder layers, heads, dim of Q, K, V, FF; the same of the transformer baselines; layers and dim
# of the recurrent models
CONFIGURATIONS = {
    "18m": ((12, 8, 320, 640, 640), (12, 8, 384, 384, 1536), (12, 384)),
    "7.5m": ((8, 8, 240, 480, 480), (8, 8, 288, 288, 1152), (8, 288)),
    "7.5m-regression": ((8, 8, 240, 480, 480), (8, 8, 288, 288, 1152), (8, 288)),
    "3m": ((4, 4, 144, 288, 288), (8, 4, 144, 144, 576), (8, 144)),
}
TRUE_SIZES = {"18m": 17_224_955, "7.5m": 6_466_740, "7.5m-regression": 6_466_740, "3m": 1_177_968}


@pytest.mark.parametrize("preset", sorted(CONFIGURATIONS))
def test_table_of_configurations(preset):
    """The dimensions are the table's. The sizes that it states do not follow from them: 17.2, 6.5
    and 1.2 M, not 18, 7.5 and 3 M.
    """
    shipped = load_preset(preset)
    ours, transformers, recurrent = CONFIGURATIONS[preset]
    keys = ("layers", "heads", "dim", "value_dim", "ffn_dim")
    assert tuple(shipped["retention"][key] for key in keys) == ours
    assert tuple(shipped["attention"][key] for key in keys) == transformers
    assert (shipped["recurrent"]["layers"], shipped["recurrent"]["dim"]) == recurrent
    assert shipped["train"]["epochs"] == 20
    assert shipped["finetune"]["epochs"] == 5
    count = models.count_configured(
        build_model_config(
            "bitimelygpt",
            preset,
            **planted.use_paper_tokens("bitimelygpt", models.default_shape(preset)),
        )
    )
    assert count == TRUE_SIZES[preset] < shipped["paper_parameters"]


def test_table_of_the_probing_study():
    """Four sequence representations, from the last layer or the last two."""
    model, batch = tiny(), signal(rows=3)
    encoded = model(batch)
    for readout, width in (("sos", 64), ("eos", 64), ("sos+eos", 128), ("mean", 64)):
        assert heads.pool(encoded, model, readout, "last").shape == (3, width)
        assert heads.pool(encoded, model, readout, "last-two").shape == (3, 2 * width)


@pytest.mark.parametrize(
    ("row", "name", "objective"),
    [
        ("next-previous token prediction (ours)", "bitimelygpt", "next-previous-strict"),
        ("replacing BAAR with next token prediction", "timelygpt", "next"),
        ("replacing BAAR with masking (TimelyBERT)", "timelybert", "masked"),
    ],
)
def test_table_of_the_ablation_pairs_architecture_and_objective(row, name, objective):
    """The same stack in each row: only the directions differ. Strict stands for the paper's own."""
    assert registry.models[name].facts.objective == objective
    assert models.count_parameters(tiny(name)) == models.count_parameters(tiny("bitimelygpt"))


def test_masking_hides_forty_percent_of_the_timesteps():
    result = objectives.get("masked")(
        tiny("timelybert", length=400), signal(rows=4, length=400), torch.Generator().manual_seed(0)
    )
    assert result["valid"].all(-1).sum(1).tolist() == [40] * 4  # of 100 tokens


def test_fine_tuning_reads_sos_of_the_last_layer():
    model = tiny()
    head = heads.Classifier(model, outputs=5)
    assert (head.readout, head.layers) == ("sos", "last")
    wanted = head.double().linear(model.norm(model(signal()).hidden[-1][:, 0]))
    torch.testing.assert_close(head(signal()), wanted)


def test_irregular_records_decay_by_months():
    """D_nm = gamma^(months between the records), and codes of one day do not decay."""
    q, k, _ = qkv(count=4)
    times = torch.tensor([[0.0, 1.5, 1.5, 30.0]], dtype=torch.float64)
    R = retention_matrix(q, k, log_decay=GAMMA.log(), times=times)
    plain = torch.einsum("bnhk,bmhk->bhnm", q, k) / 2
    for n, m, months in ((1, 0, 1.5), (2, 1, 0.0), (3, 1, 28.5)):
        torch.testing.assert_close(R[0, :, n, m], plain[0, :, n, m] * GAMMA**months)
