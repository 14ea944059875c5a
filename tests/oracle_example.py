"""`tf.train.Example` messages: written, read slowly, and read by the `protobuf` package."""

import struct

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

KINDS = {1: "bytes", 2: "float", 3: "int64"}


class MalformedError(Exception):
    """The bytes are no message."""


# --- writing ------------------------------------------------------------------------------------


def varint(value):
    value &= (1 << 64) - 1
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def part(number, content):
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def int64_list(values, *, packed=True):
    if packed:
        return part(3, part(1, b"".join(map(varint, values))))
    return part(3, b"".join(b"\x08" + varint(value) for value in values))


def float_list(values, *, packed=True):
    floats = [struct.pack("<f", value) for value in values]
    return part(2, part(1, b"".join(floats)) if packed else b"".join(b"\x0d" + f for f in floats))


def bytes_list(values):
    return part(1, b"".join(part(1, value) for value in values))


def entry(name, value):
    return part(1, part(1, name.encode()) + part(2, value))


def example(**features):
    """An `Example` with these lists."""
    return part(1, b"".join(entry(name, value) for name, value in features.items()))


def sequence_example(context, sequences):
    """A `SequenceExample` with these lists, and lists of lists."""
    lists = b"".join(
        entry(name, b"".join(part(1, step) for step in steps)) for name, steps in sequences.items()
    )
    return example(**context) + part(2, lists)


# --- reading ------------------------------------------------------------------------------------


def read_varint(data, at):
    value = 0
    for count in range(10):
        if at + count >= len(data):
            raise MalformedError("cut")
        byte = data[at + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value & ((1 << 64) - 1), at + count + 1
    raise MalformedError("long")


def fields(data):
    """(number, wire type, content) of each field; groups are left out."""
    at, found, groups = 0, [], []
    while at < len(data):
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not number or tag >= 1 << 32 or kind > 5:
            raise MalformedError("tag")
        if kind == 3:
            groups.append(number)
            continue
        if kind == 4:
            if not groups or groups.pop() != number:
                raise MalformedError("group")
            continue
        start = at
        if kind == 0:
            _, at = read_varint(data, at)
        else:
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                length, start = read_varint(data, at)
            at = start + length
        if at > len(data):
            raise MalformedError("cut")
        if not groups:
            found.append((number, kind, data[start:at]))
    if groups:
        raise MalformedError("group")
    return found


def values_of(feature):
    """(kind, values) of a `Feature`; `None` if it has no list."""
    kind, content = None, b""
    for number, wire, data in fields(feature):
        if wire == 2 and number in KINDS:
            content = content + data if kind == KINDS[number] else data
            kind = KINDS[number]
    if kind is None:
        return None
    values = []
    for number, wire, data in fields(content):
        if number != 1:
            continue
        if kind == "bytes" and wire == 2:
            values.append(data)
        elif kind == "float" and wire in {2, 5}:
            if len(data) % 4:
                raise MalformedError("floats")
            values += struct.unpack(f"<{len(data) // 4}f", data)
        elif kind == "int64" and wire in {0, 2}:
            at = 0
            while at < len(data):
                value, at = read_varint(data, at)
                values.append(value - (1 << 64) if value >> 63 else value)
    return kind, values


def entries(message, field):
    """Name and value of each entry of a map, in order."""
    found = []
    for number, wire, data in fields(message):
        if (number, wire) == (field, 2):
            for inner, inner_wire, pair in fields(data):
                if (inner, inner_wire) == (1, 2):
                    own = fields(pair)
                    name = [content for n, w, content in own if (n, w) == (1, 2)]
                    value = b"".join(content for n, w, content in own if (n, w) == (2, 2))
                    found.append((name[-1].decode() if name else "", value))
    return found


def features_of(message):
    """Name to (kind, values), of an `Example`."""
    found = {}
    for name, feature in entries(message, 1):
        values = values_of(feature)
        if values is not None:
            found[name] = values
    return found


# --- the protobuf package -----------------------------------------------------------------------


def _message_class():
    """`tf.train.Example`, from a description of the three files that define it."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name, *described, oneof=None):
        own = file.message_type.add(name=name)
        if oneof:
            own.oneof_decl.add(name=oneof)
        for number, (field, label, kind) in enumerate(described, 1):
            added = own.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = added.TYPE_MESSAGE, f".t.{kind}"
            else:
                added.type = kind
            if oneof:
                added.oneof_index = 0
        return own

    of = descriptor_pb2.FieldDescriptorProto
    one, many = of.LABEL_OPTIONAL, of.LABEL_REPEATED
    message("BytesList", ("value", many, of.TYPE_BYTES))
    message("FloatList", ("value", many, of.TYPE_FLOAT))
    message("Int64List", ("value", many, of.TYPE_INT64))
    lists = [("bytes_list", one, "BytesList"), ("float_list", one, "FloatList")]
    message("Feature", *lists, ("int64_list", one, "Int64List"), oneof="kind")
    features = message("Features", ("feature", many, "Features.FeatureEntry"))
    map_entry = features.nested_type.add(name="FeatureEntry")
    map_entry.options.map_entry = True
    map_entry.field.add(name="key", number=1, label=one, type=of.TYPE_STRING)
    map_entry.field.add(
        name="value", number=2, label=one, type=of.TYPE_MESSAGE, type_name=".t.Feature"
    )
    message("Example", ("features", one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = _message_class()


def by_protobuf(message):
    """`features_of` by the `protobuf` package, as its users write it."""
    found = {}
    for name, feature in Example.FromString(message).features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind is not None:
            found[name] = (kind.removesuffix("_list"), list(getattr(feature, kind).value))
    return found


def shaped(values, dtype, shape):
    """What `ParseExample` returns for these values; `ValueError` if they do not fit."""
    array = np.empty(len(values), object) if dtype is bytes else np.array(values, dtype)
    if dtype is bytes:
        array[:] = values
    if not shape and len(values) != 1:
        raise ValueError("one value")
    array = array.reshape(shape) if len(values) or -1 not in shape else array.reshape(0, *shape[1:])
    return array if shape else array[()]
