"""References to items of stored responses: the id of an item leads to its response, and the item takes their place."""

import asyncio
from typing import Any
from uuid import UUID

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.harness import Inside, inside

from headstart.openai.chat.chat_delta import ToolCallDelta
from headstart.openai.chat.chat_parts import ChatOutputPart, ChatOutputPartKind
from headstart.openai.responses_api.input_items import first_referenced_response, response_id_of_item
from headstart.openai.responses_api.response_objects import ResponseTemplate

QUESTION = {"role": "user", "content": "Hello"}


def reference(item_id: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


@given(st.uuids(), st.sampled_from(ChatOutputPartKind), st.integers(0, 2**20))
def test_the_id_of_an_output_item_leads_to_its_response(number: UUID, kind: ChatOutputPartKind, index: int) -> None:
    shape = ResponseTemplate(f"resp_{number.hex}", 0, "m", {})
    call = ToolCallDelta(0, "call_1", "f") if kind is ChatOutputPartKind.TOOL_CALL else None
    item_id = shape.item(ChatOutputPart(kind, index, call), "completed")["id"]
    assert response_id_of_item(item_id) == shape.response_id
    assert first_referenced_response([QUESTION, reference(item_id)]) == shape.response_id


@pytest.mark.parametrize("item_id", ["", "msg_", "msg_5", "x_" + "0" * 34, "msg_" + "g" * 34, "msg_" + "0" * 33])
def test_an_id_of_another_form_leads_nowhere(item_id: str) -> None:
    assert response_id_of_item(item_id) is None


@pytest.mark.parametrize("items", [None, "text", [], [5], [QUESTION], [reference(5)], [reference("other")], {}])
def test_an_input_without_references_needs_no_response(items: Any) -> None:
    assert first_referenced_response(items) is None


async def respond(server: Inside, items: list[Any], **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    body = {"input": items, "max_output_tokens": 2, **fields}
    return await server.client.post("/v1/responses", json=body, headers=headers)


def test_a_reference_stands_for_the_item(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            [said] = (await respond(server, [QUESTION])).json()["output"]
            whole = (await respond(server, [QUESTION, said, QUESTION])).json()
            made = (await respond(server, [QUESTION, reference(said["id"]), QUESTION])).json()
            assert made["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
            assert made["output"][0]["content"] == whole["output"][0]["content"]
            listed = (await server.client.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json()["data"]
            assert listed[1]["id"] == said["id"] and listed[1]["content"][0]["text"] == said["content"][0]["text"]

    asyncio.run(go())


def test_a_reference_to_an_item_that_is_not_stored_is_a_404(folder: str) -> None:
    async def go() -> None:
        async with inside(folder) as server:
            [unstored] = (await respond(server, [QUESTION], store=False)).json()["output"]
            [stored] = (await respond(server, [QUESTION])).json()["output"]
            for item_id in ("msg_1", "rs_" + "0" * 34, unstored["id"], stored["id"][:-2] + "07"):
                answer = await respond(server, [QUESTION, reference(item_id)])
                error = answer.json()["error"]
                assert (answer.status_code, error["code"], error["param"]) == (404, "item_not_found", "input[1].id")
            for items, param in (
                ([QUESTION, *[reference(stored["id"])] * 2], "input[2].id"),
                ([reference(None)], "input[0].id"),
                ([reference(5)], "input[0].id"),
            ):
                answer = await respond(server, items)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    asyncio.run(go())


def test_another_tenant_cannot_refer_to_an_item(folder: str) -> None:
    async def go() -> None:
        async with inside(folder, api_key=("one", "two")) as server:
            one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
            [said] = (await respond(server, [QUESTION], headers=one)).json()["output"]
            unknown = "msg_" + "0" * 34
            refused = await respond(server, [reference(said["id"])], headers=two)
            assert refused.status_code == 404
            assert (
                refused.text.replace(said["id"], unknown)
                == (await respond(server, [reference(unknown)], headers=two)).text
            )
            assert (await respond(server, [reference(said["id"])], headers=one)).status_code == 200

    asyncio.run(go())
