"""Columns on their way into the core: layouts taken without a copy, values refused, schemas, Python work of a unit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from inputs import DTYPES, assert_same_tensor, jagged, ragged_on_2, ramp, raw_bytes, strided, table
from loopback import COLUMN, Column, Core, dense_form, job_form, take
from tensordict import LazyStackedTensorDict, MetaData, NonTensorData, TensorDict

from transfer_queue import _columns, _results, _values
from transfer_queue._columns import pack_lists, pack_row, pack_table

STRIDED, OFFSETS, POINTERS, OBJECTS = 1, 2, 3, 4


def stored(fields: Any, name: str = "x") -> Column:
    """What the core copies of one column."""
    return take(pack_row(fields) if type(fields) is dict else pack_table(fields))[name]


def assert_stored(column: Column, want: list[torch.Tensor]) -> None:
    assert len(column.cells) == len(want)
    for cell, tensor in zip(column.cells, want, strict=True):
        assert (cell.shape, cell.data) == (tuple(tensor.shape), raw_bytes(tensor))


def base_of(fields: Any) -> int:
    """Address that the first column starts at."""
    packed = pack_table(fields)
    return COLUMN.unpack(bytes(_values.memory_at(packed.address, COLUMN.size)))[5]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels_bit_for_bit(dtype):
    if dtype.itemsize == 1 and dtype.is_floating_point:
        value = torch.arange(12, dtype=torch.uint8).view(dtype).reshape(3, 4)
    else:
        value = ramp(3, 4, dtype=dtype)
    column = stored(table(3, x=value))
    assert _values.DTYPES[column.dtype] is dtype
    assert_stored(column, list(value))
    assert_stored(stored(table(12, x=value.reshape(-1))), list(value.reshape(-1)))


def test_numbers_have_rank_0_and_no_ragged_dimension():
    column = stored(table(3, x=ramp(3)))
    assert [cell.shape for cell in column.cells] == [()] * 3
    assert (column.form, column.ragged) == (STRIDED, 0)
    assert stored(table(3, x=ramp(3, 1))).ragged == 1


def views() -> dict[str, tuple[torch.Tensor, bool]]:
    """Name -> (a view of 3 rows, whether it can be taken where it lies)."""
    wide, numbers = ramp(9, 6, dtype=torch.float32), ramp(3, 4, dtype=torch.complex64)
    return {
        "slice of rows": (wide[4:7], True),
        "every second row": (wide[1:7:2], True),
        "leading part of each row": (wide[:3, :4], True),
        "expanded rows": (wide[:1].expand(3, 6), True),
        "expanded inner dimension": (wide[:3, :1].expand(3, 5), False),
        "every second number": (wide[:3, ::2], False),
        "transposed": (wide[:6, :3].t(), False),
        "conjugate": (numbers.conj(), False),
        "negative": (numbers.conj().imag, False),
        "rows without elements": (wide[:3, :0], True),
        "requires grad": ((wide[:3].clone().requires_grad_() * 2)[:, :5], True),
    }


@pytest.mark.parametrize("kind", views())
def test_a_view_travels_as_what_it_shows(kind):
    view, in_place = views()[kind]
    want = [row.resolve_conj().resolve_neg().clone() for row in view.detach()]
    fields = table(3, x=view)
    assert_stored(stored(fields), want)
    assert (base_of(fields) == fields["x"].data_ptr()) is in_place


def test_parameters_and_memory_mapped_tensors_are_plain_memory(tmp_path):
    value = ramp(3, 2, dtype=torch.float32)
    assert_stored(stored({"x": torch.nn.Parameter(value)}), [value])
    mapped = table(3, x=value).memmap(tmp_path)
    assert_stored(stored(mapped), list(value))


def test_a_row_put_alone_has_the_shape_it_has():
    for value in (torch.tensor(0.5), ramp(4), ramp(2, 3), torch.empty(2, 0, 3), ramp(3, 2).t()):
        column = stored({"x": value})
        assert_stored(column, [value])
        assert column.ragged == min(value.dim(), 1)


@pytest.mark.parametrize("offsets", [torch.int64, torch.int32], ids=str)
def test_a_jagged_tensor_is_taken_where_it_lies(offsets):
    values = ramp(9, 2, dtype=torch.bfloat16)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 4, 9], dtype=offsets))
    fields = table(3, x=nested)
    column = stored(fields)
    assert (column.form, column.ragged, base_of(fields)) == (OFFSETS, 1, values.data_ptr())
    assert_stored(column, [values[:4], values[4:4], values[4:]])


def test_jagged_tensors_with_holes_narrowed_or_not_contiguous_are_taken_row_by_row():
    values = ramp(9, 2)
    offsets, lengths = torch.tensor([0, 4, 9]), torch.tensor([2, 5])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    assert_stored(stored(table(2, x=holes)), [values[:2], values[4:9]])
    turned = torch.nested.nested_tensor_from_jagged(ramp(2, 9).t(), offsets)
    assert_stored(stored(table(2, x=turned)), [ramp(2, 9).t()[:4], ramp(2, 9).t()[4:]])
    part = torch.nested.nested_tensor_from_jagged(values, torch.tensor([1, 4, 7]))
    assert_stored(stored(table(2, x=part)), [values[1:4], values[4:7]])


def test_offsets_that_do_not_fit_are_a_value_error():
    wrong = torch.nested.nested_tensor_from_jagged(ramp(5), torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match="field 'x': offsets"):
        pack_table(table(2, x=wrong))


@pytest.mark.parametrize("lengths", [[7, 9], [7, 7], [5], [0, 2]], ids=str)
def test_another_ragged_dimension_is_kept(lengths):
    nested, want = ragged_on_2(lengths)
    column = stored(table(len(lengths), x=nested))
    assert column.ragged == 2
    assert_stored(column, want)


def test_a_conjugate_jagged_tensor_is_resolved():
    values = ramp(5, dtype=torch.complex64)
    nested = torch.nested.nested_tensor_from_jagged(values.conj(), torch.tensor([0, 2, 5]))
    want = values.conj().resolve_conj()
    assert_stored(stored(table(2, x=nested)), [want[:2], want[2:]])


def test_strided_nested_tensors_and_lists_of_tensors_are_tensor_columns():
    want = [ramp(3, 2), ramp(1, 5, start=30), ramp(2, 4, start=60)]
    for value in (strided(want), want, [row.t().contiguous().t() for row in want]):
        column = stored(table(3, x=value))
        assert (column.kind, column.form, column.ragged) == (1, POINTERS, 1)
        assert_stored(column, want)


def test_a_list_of_numbers_of_ranks_and_of_views_is_a_tensor_column():
    for want in ([torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(1), ramp(2)], [torch.empty(0), torch.ones(2)]):
        assert_stored(stored(table(2, x=want)), want)
    numbers = ramp(3, dtype=torch.complex64)
    column = stored(table(2, x=[numbers.conj(), numbers.conj()[1:]]))
    assert_stored(column, [numbers.conj().resolve_conj(), numbers[1:].conj().resolve_conj()])


def test_ragged_rows_of_a_lazy_stack_are_a_tensor_column():
    parts = [TensorDict({"x": ramp(n), "same": ramp(2), "note": f"n{n}"}, []) for n in (2, 3)]
    columns = take(pack_table(LazyStackedTensorDict(*parts)))
    assert_stored(columns["x"], [ramp(2), ramp(3)])
    assert_stored(columns["same"], [ramp(2), ramp(2)])
    assert [cell.data for cell in columns["note"].cells] == [b"n2", b"n3"]


def objects(column: Column) -> list[Any]:
    """The values of an object column."""
    assert (column.kind, column.form) == (2, OBJECTS)
    data = b"".join(cell.data for cell in column.cells)
    offsets = np.cumsum([0, *(len(cell.data) for cell in column.cells)]).tolist()
    return _values.decode_objects(_values.address_of(data), offsets, bytes(cell.codec for cell in column.cells))


def test_values_of_any_kind_are_objects():
    for want in (["a", "b"], [1, "a"], [None, {"k": [1]}], [[1], [2, 3]], [b"\x00", b""], [("t",), {1}]):
        assert objects(stored(table(2, x=want))) == want


def test_tensors_beside_other_values_stay_objects():
    got = objects(stored(table(3, x=[ramp(2), None, "c"])))
    assert_same_tensor(got[0], ramp(2))
    assert got[1:] == [None, "c"]


def test_a_constant_column_is_sent_once_for_all_rows():
    fields = TensorDict({"text": "hello", "meta": MetaData({"a": 1}, batch_size=[3]), "n": ramp(3)}, [3])
    fields["tensor"] = NonTensorData(ramp(2), batch_size=[3])
    columns = take(pack_table(fields))
    assert objects(columns["text"]) == ["hello"] * 3
    assert objects(columns["meta"]) == [{"a": 1}] * 3
    assert_stored(columns["tensor"], [ramp(2)] * 3)


def test_numpy_columns_of_objects_and_strings_are_taken_by_row():
    fields = TensorDict(
        {"o": np.array([{"a": 1}, None, "c"], dtype=object), "u": np.array(["x", "yy", ""]), "s": np.array([b"1"] * 3)},
        [3],
    )
    columns = take(pack_table(fields))
    assert objects(columns["o"]) == [{"a": 1}, None, "c"]
    assert [(value, type(value)) for value in objects(columns["u"])] == [(np.str_(v), np.str_) for v in ("x", "yy", "")]
    assert objects(columns["s"]) == [np.bytes_(b"1")] * 3


def test_values_of_a_dict_stay_opaque():
    array = np.arange(3)
    columns = take(pack_row({"array": array, "n": 3, "list": [1, 2], "none": None, "text": NonTensorData("x")}))
    assert objects(columns["n"]) + objects(columns["list"]) + objects(columns["none"]) == [3, [1, 2], None]
    assert objects(columns["text"]) == ["x"]
    assert objects(columns["array"])[0].tolist() == [0, 1, 2]


def test_large_values_are_lent_not_joined():
    large = bytes(1 << 20)
    packed = pack_row({"x": large})
    raw = COLUMN.unpack(bytes(_values.memory_at(packed.address, COLUMN.size)))
    assert np.frombuffer(_values.memory_at(raw[9], 8), dtype=np.uint64)[0] == _values.address_of(large)
    assert objects(stored({"x": large})) == [large]


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
    "fake": fake,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_plain_memory_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"(?i)field 'odd'.*{kind}"):
        pack_row({"fine": ramp(2), "odd": REFUSED[kind]()})


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_they_are_refused_in_a_batch_too(kind):
    with pytest.raises(ValueError, match=f"field 'odd'.*{kind}"):
        pack_table(TensorDict({"odd": REFUSED[kind]()}, batch_size=[3]))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
def test_quantized_tensors_are_refused_by_name():
    value = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match="field 'odd': quantized dtype"):
        pack_row({"odd": value})


def test_tensors_inside_a_torch_func_transformation_are_refused():
    def put(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ValueError, match=r"field 'odd'.*no memory"):
            pack_row({"odd": value})
        return value

    torch.vmap(put)(ramp(3))


def test_other_refusals_name_the_field():
    def nested_table() -> None:
        pack_table(TensorDict({"odd": TensorDict({"a": ramp(2)}, [2])}, [2]))

    for refused, message in [
        (nested_table, "field 'odd'.*TensorDict"),
        (lambda: pack_row({"odd": TensorDict({"a": ramp(2)}, [2])}), "field 'odd'.*TensorDict"),
        (lambda: pack_row({"odd": jagged([ramp(2)])}), "field 'odd'.*kv_batch_put"),
        (lambda: pack_row({3: ramp(2)}), "field names must be str.*3"),
        (lambda: pack_table(table(2, odd=[ramp(2), ramp(2).float()])), "field 'odd'.*float32, int64"),
        (lambda: pack_table(TensorDict({"a": torch.tensor(1)}, [])), "batch dimension"),
        (lambda: pack_lists(["odd"], [ramp(3, 2)], 2), "field 'odd': 3 rows, want 2"),
        (lambda: pack_lists(["odd"], [["a"]], 2), "field 'odd': 1 rows, want 2"),
        (lambda: pack_lists(["odd"], [jagged([ramp(2)] * 3)], 2), "field 'odd': 3 rows, want 2"),
        (lambda: pack_lists(["odd"], ["ab"], 2), "field 'odd'.*str"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()


def test_schemas_describe_what_is_stored():
    ragged, _ = ragged_on_2([2, 3])
    fields = table(
        2, n=ramp(2), c=ramp(2, 1), j=jagged([ramp(4), ramp(1)]), r=ragged, t=["a", "b"], s=[ramp(1), ramp(2, 2)]
    )
    schemas = {name: schema.to_dict(2) for name, schema in pack_table(fields).schemas()}
    assert list(schemas) == ["n", "c", "j", "r", "t", "s"]

    def shapes(name: str) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in schemas[name].get("per_sample_shapes", [schemas[name]["shape"]])]

    assert (shapes("n"), shapes("c")) == ([()], [(1,)])
    assert shapes("j") == [(4,), (1,)]
    assert shapes("r") == [(4, 2), (4, 3)]
    assert shapes("s") == [(1,), (2, 2)]
    assert [schemas[name]["is_nested"] for name in schemas] == [False, False, True, True, False, True]
    assert schemas["t"] == {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    assert tuple(schemas["j"]["shape"]) == (4,)


KINDS = {
    "numbers": ramp(2, dtype=torch.float32),
    "same shapes": ramp(2, 3),
    "ragged": jagged([ramp(3), ramp(1)]),
    "two dimensions": strided([ramp(3, 2), ramp(1, 5)]),
    "objects": ["a", {"b": 1}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [job_form, dense_form, None], ids=["job", "dense", "result"])
def test_a_merge_function_sees_rows_in_memory_of_its_own(kind, form):
    packed = pack_table(table(2, x=KINDS[kind]))
    columns = list(take(packed).values())
    core = Core()
    reply = core.reply(columns, inline=True, shape=form)
    (raw,) = _results.read_columns(reply.address, 1)
    got = _results.job_values("x", raw, 2)
    if kind == "objects":
        assert got == KINDS[kind]
        return
    assert_stored(columns[0], got)
    for row in got:
        row.fill_(9)
    again = _results.job_values("x", raw, 2)
    assert_stored(columns[0], again)


@pytest.mark.parametrize("form", [job_form, dense_form, None], ids=["job", "dense", "result"])
def test_a_parser_sees_tensors_for_one_shape_and_lists_otherwise(form):
    turned, rows_of_turned = ragged_on_2([3, 3])
    fields = {**{kind.replace(" ", "_"): value for kind, value in KINDS.items()}, "turned": turned}
    packed = pack_table(table(2, **fields))
    reply = Core().reply(list(take(packed).values()), inline=True, shape=form)
    raw = _results.read_columns(reply.address, len(packed))
    got = {name: _results.parser_input(name, one, 2) for name, one in zip(packed.names, raw, strict=True)}
    kinds = {name: type(value).__name__ for name, value in got.items()}
    assert kinds == {
        "numbers": "Tensor",
        "same_shapes": "Tensor",
        "ragged": "list",
        "two_dimensions": "list",
        "objects": "list",
        "turned": "Tensor",
    }
    assert_same_tensor(got["numbers"], KINDS["numbers"])
    assert_same_tensor(got["same_shapes"], KINDS["same shapes"])
    assert_same_tensor(got["turned"], torch.stack(rows_of_turned))
    assert_same_tensor(got["two_dimensions"][1], ramp(1, 5))


def test_merged_values_are_packed():
    old = [[ramp(2), ramp(1)], ["a", "b"], [torch.tensor(1.0), torch.tensor(2.0)]]
    new = [[ramp(1), ramp(3)], ["c", "d"], [torch.tensor(3.0), torch.tensor(4.0)]]

    def merge(was: Any, value: Any) -> Any:
        return torch.cat([was, value]) if isinstance(was, torch.Tensor) and was.dim() else was + value

    columns = take(_columns.merge_columns(merge, ["x", "text", "sum"], old, new))
    assert_stored(columns["x"], [torch.cat([ramp(2), ramp(1)]), torch.cat([ramp(1), ramp(3)])])
    assert objects(columns["text"]) == ["ac", "bd"]
    assert_stored(columns["sum"], [torch.tensor(4.0), torch.tensor(6.0)])


def test_a_merge_must_keep_dtype_and_kind():
    for was, result, message in [
        (ramp(2), ramp(2).float(), "keep dtype torch.int64, got torch.float32"),
        (ramp(2), 3, "keep dtype torch.int64, got int"),
        (ramp(2), jagged([ramp(2)]), "nested"),
        ("a", ramp(2), "must remain non-tensor"),
    ]:
        with pytest.raises(RuntimeError, match="field 'x', row 0") as raised:
            _columns.merge_columns(lambda *_, result=result: result, ["x"], [[was]], [[was]])
        assert isinstance(raised.value.__cause__, TypeError)
        assert re.search(message, str(raised.value.__cause__))


def test_parsed_columns_are_packed():
    def parse(columns: dict[str, Any]) -> dict[str, Any]:
        return {
            "array": np.arange(6, dtype=np.float32).reshape(2, 3),
            "dense": columns["dense"] * 2,
            "list": [torch.ones(1), torch.ones(3)],
            "text": ("a", "b"),
            "nested": jagged([ramp(2), ramp(1)]),
        }

    given = {"dense": ramp(2, 2), "list": ["u", "v"], "text": [1, 2], "nested": [1, 2], "array": [0, 0]}
    columns = take(_columns.parse_columns(parse, given, 2))
    assert list(columns) == list(given)
    assert_stored(columns["dense"], list(ramp(2, 2) * 2))
    assert_stored(columns["list"], [torch.ones(1), torch.ones(3)])
    assert_stored(columns["nested"], [ramp(2), ramp(1)])
    assert_stored(columns["array"], list(torch.arange(6.0).reshape(2, 3)))
    assert objects(columns["text"]) == ["a", "b"]


def test_a_broken_parser_names_the_rule():
    columns = {"x": ramp(2, 2), "y": ramp(2)}
    for parser, error, message in [
        ("parser", TypeError, "data_parser must be callable"),
        (lambda columns: None, TypeError, "data_parser must return a dict"),
        (lambda columns: {"x": columns["x"]}, ValueError, "data_parser must not change dict keys"),
        (lambda columns: {**columns, "x": columns["x"][:0]}, ValueError, "data_parser changed the number of elements"),
        (lambda columns: {**columns, "x": "ab"}, ValueError, "data_parser changed the number of elements.*str"),
        (lambda columns: {**columns, "x": torch.tensor(1)}, ValueError, "data_parser changed the number of elements"),
    ]:
        with pytest.raises(error, match=message):
            _columns.parse_columns(parser, dict(columns), 2)
