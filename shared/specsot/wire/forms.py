"""The form of an answer on the wire, from a client and from a peer.

Refuses to know schemas and regexes.
"""

from __future__ import annotations

from specsot.params import Form, refuse
from specsot.v1 import values_pb2


def encode_form(form: Form | None) -> values_pb2.Form | None:
    if form is None:
        return None
    match form.kind:
        case "json_object":
            return values_pb2.Form(json_object=values_pb2.JsonObject())
        case "json_schema":
            return values_pb2.Form(json_schema=form.texts[0])
        case "regex":
            return values_pb2.Form(regex=form.texts[0])
        case "choice":
            return values_pb2.Form(choice=values_pb2.Choice(texts=form.texts))


def decode_form(message: values_pb2.Form) -> Form:
    """Raises InvalidRequest."""
    match message.WhichOneof("form"):
        case "json_object":
            return Form("json_object")
        case "json_schema":
            return Form("json_schema", (message.json_schema,))
        case "regex":
            return Form("regex", (message.regex,))
        case "choice":
            return Form("choice", tuple(message.choice.texts))
        case _:
            raise refuse("says no kind of form")
