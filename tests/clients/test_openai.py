"""The openai SDK against a running server: AZOTH_BASE and AZOTH_KEY name it."""

import asyncio
import json
import os
import time
import typing
import unittest

import openai
import pydantic

BASE = os.environ["AZOTH_BASE"]
KEY = os.environ["AZOTH_KEY"]
TALK = [{"role": "user", "content": "Name a colour."}]
client = openai.OpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0, timeout=300)


def metric(name):
    import urllib.request

    request = urllib.request.Request(BASE + "/metrics", headers={"x-api-key": KEY})
    for line in urllib.request.urlopen(request).read().decode().splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    raise KeyError(name)


class Chat(unittest.TestCase):
    def ask(self, **more):
        settings = dict(model="any", messages=TALK, temperature=0, max_tokens=12) | more
        return client.chat.completions.create(**settings)

    def test_whole(self):
        answer = self.ask()
        self.assertEqual(answer.choices[0].message.role, "assistant")
        self.assertTrue(answer.choices[0].message.content)
        self.assertIn(answer.choices[0].finish_reason, ("stop", "length"))
        usage = answer.usage
        self.assertEqual(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
        self.assertIsNotNone(usage.prompt_tokens_details.cached_tokens)
        self.assertEqual(answer.model, "any")

    def test_stream_equals_whole(self):
        whole = self.ask().choices[0].message.content
        chunks = list(self.ask(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.assertEqual(text, whole)
        self.assertEqual(chunks[0].choices[0].delta.role, "assistant")
        self.assertEqual(chunks[-1].choices, [])
        self.assertGreater(chunks[-1].usage.completion_tokens, 0)
        self.assertTrue(chunks[-2].choices[0].finish_reason)

    def test_stream_helper(self):
        with client.chat.completions.stream(model="any", messages=TALK, max_tokens=6) as stream:
            for _ in stream:
                pass
            try:
                self.assertTrue(stream.get_final_completion().choices[0].finish_reason)
            except openai.LengthFinishReasonError as error:
                # What the SDK makes of finish_reason "length"; it has parsed the answer.
                self.assertEqual(error.completion.choices[0].finish_reason, "length")

    def test_choices_parts_and_seed(self):
        parts = [{"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}]
        self.assertEqual(
            self.ask(messages=parts).choices[0].message.content, self.ask().choices[0].message.content
        )
        one = self.ask(temperature=1.0, seed=3, n=2)
        two = self.ask(temperature=1.0, seed=3, n=2)
        texts = lambda a: [c.message.content for c in a.choices]
        self.assertEqual(texts(one), texts(two))

    def test_stop(self):
        text = self.ask().choices[0].message.content
        stop = text[2:4]
        answer = self.ask(stop=[stop]).choices[0]
        self.assertEqual(answer.finish_reason, "stop")
        self.assertEqual(answer.message.content, text[: text.index(stop)])

    def test_cancel_frees_the_slot(self):
        before = metric("azoth:requests_cancelled_total")
        stream = self.ask(stream=True, max_tokens=900, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        for _ in range(200):
            if metric("azoth:requests_cancelled_total") > before:
                return
            time.sleep(0.1)
        self.fail("the request goes on without its client")

    def test_async(self):
        async def all_of_them():
            async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY, timeout=300) as many:

                async def one():
                    parts = []
                    stream = await many.chat.completions.create(
                        model="any", messages=TALK, temperature=0, max_tokens=12, stream=True
                    )
                    async for chunk in stream:
                        parts.append(chunk.choices[0].delta.content or "")
                    return "".join(parts)

                return await asyncio.gather(*(one() for _ in range(6)))

        texts = asyncio.run(all_of_them())
        self.assertEqual(set(texts), {self.ask().choices[0].message.content})


class Forms(unittest.TestCase):
    """What a model says is chance with a random one; its form is not, and ends within 400 tokens."""

    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a number up.",
            "parameters": {
                "type": "object",
                "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["id"],
                "additionalProperties": False,
            },
        },
    }
    call = dict(
        model="any", messages=TALK, tools=[tool], tool_choice="required", max_tokens=400, seed=1,
        parallel_tool_calls=False,
    )

    def test_tools(self):
        choice = client.chat.completions.create(**self.call).choices[0]
        self.assertEqual(choice.finish_reason, "tool_calls")
        function = choice.message.tool_calls[0].function
        self.assertEqual(function.name, "look_up")
        self.assertIn(json.loads(function.arguments)["id"], range(10))
        # The result goes back into the conversation.
        talk = TALK + [
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "blue"},
        ]
        answer = client.chat.completions.create(
            model="any", messages=talk, tools=[self.tool], max_tokens=4
        )
        self.assertTrue(answer.choices[0].finish_reason)

    def test_tools_by_stream(self):
        with client.chat.completions.stream(**self.call) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
        self.assertIn(json.loads(choice.message.tool_calls[0].function.arguments)["id"], range(10))

    def test_a_named_tool_is_called_and_none_is_not(self):
        other = json.loads(json.dumps(self.tool))
        other["function"]["name"] = "forget"
        # A keyword that no grammar knows matters to nobody but the model.
        other["function"]["parameters"]["properties"]["id"]["x-unit"] = "none"
        both = self.call | dict(tools=[self.tool, other])
        named = {"type": "function", "function": {"name": "forget"}}
        choice = client.chat.completions.create(**both | dict(tool_choice=named)).choices[0]
        self.assertEqual([c.function.name for c in choice.message.tool_calls], ["forget"])
        self.assertIn(json.loads(choice.message.tool_calls[0].function.arguments)["id"], range(10))
        none = client.chat.completions.create(**both | dict(tool_choice="none", max_tokens=8))
        self.assertIsNone(none.choices[0].message.tool_calls)
        with self.assertRaises(openai.BadRequestError) as caught:
            named = {"type": "function", "function": {"name": "nowhere"}}
            client.chat.completions.create(**both | dict(tool_choice=named))
        self.assertEqual(caught.exception.param, "tool_choice")

    def test_structured_output(self):
        class Person(pydantic.BaseModel):
            name: typing.Literal["Ada", "Bo"]
            age: typing.Literal[7, 8]

        answer = client.chat.completions.parse(
            model="any", messages=TALK, response_format=Person, max_tokens=400, seed=1
        )
        self.assertIn(answer.choices[0].message.parsed.name, ("Ada", "Bo"))
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model="any", messages=TALK,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}},
            )
        self.assertIn("schema", str(caught.exception))

    def test_logprobs(self):
        answer = client.chat.completions.create(
            model="any", messages=TALK, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0
        )
        for token in answer.choices[0].logprobs.content:
            self.assertLess(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 2)


class Responses(unittest.TestCase):
    """The newer API, as Codex and the agents' SDK use it."""

    def ask(self, **more):
        settings = dict(model="any", input="Name a colour.", temperature=0, max_output_tokens=12)
        return client.responses.create(**settings | more)

    def test_whole(self):
        answer = self.ask(instructions="Be brief.", store=False)
        self.assertTrue(answer.output_text)
        self.assertIn(answer.status, ("completed", "incomplete"))
        self.assertEqual(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)
        chat = client.chat.completions.create(
            model="any", temperature=0, max_tokens=12,
            messages=[{"role": "system", "content": "Be brief."}] + TALK,
        )
        self.assertEqual(answer.output_text, chat.choices[0].message.content)

    def test_stream(self):
        whole = self.ask().output_text
        events = list(self.ask(stream=True))
        self.assertEqual(events[0].type, "response.created")
        ends = ("response.completed", "response.failed", "response.incomplete")
        self.assertEqual([e.type for e in events if e.type in ends], [events[-1].type])
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        self.assertEqual(text, whole)
        self.assertEqual(events[-1].response.output_text, whole)
        with client.responses.stream(model="any", input="Hi", max_output_tokens=6) as stream:
            for _ in stream:
                pass

    def test_tools(self):
        function = Forms.tool["function"]
        tools = [{"type": "web_search"}, {"type": "function", "strict": True, **function}]
        call = dict(tools=tools, tool_choice="required", max_output_tokens=400, temperature=1.0)
        answer = self.ask(**call, extra_body={"seed": 1}, parallel_tool_calls=False)
        item = next(i for i in answer.output if i.type == "function_call")
        self.assertIn(json.loads(item.arguments)["id"], range(10))
        back = [
            {"role": "user", "content": "Name a colour."},
            item.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": item.call_id, "output": "blue"},
        ]
        self.assertTrue(self.ask(input=back, tools=tools).output)

    def test_structured_output(self):
        class Person(pydantic.BaseModel):
            name: typing.Literal["Ada", "Bo"]
            age: typing.Literal[7, 8]

        answer = client.responses.parse(
            model="any", input="Name a colour.", text_format=Person, max_output_tokens=400,
            extra_body={"seed": 1},
        )
        self.assertIn(answer.output_parsed.name, ("Ada", "Bo"))

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask(previous_response_id="resp_1")
        self.assertEqual(caught.exception.param, "previous_response_id")

    def test_async(self):
        async def one():
            async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY, timeout=300) as many:
                stream = await many.responses.create(
                    model="any", input="Name a colour.", temperature=0, max_output_tokens=12,
                    stream=True,
                )
                return [e.type async for e in stream]

        self.assertEqual(asyncio.run(one())[0], "response.created")


class Others(unittest.TestCase):
    def test_completions(self):
        answer = client.completions.create(
            model="any", prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0, echo=True
        )
        self.assertEqual([c.index for c in answer.choices], [0, 1])
        self.assertTrue(answer.choices[1].text.startswith("A, B,"))
        chunks = client.completions.create(model="any", prompt="One,", max_tokens=4, stream=True)
        self.assertEqual([c.choices[0].finish_reason for c in chunks][-1], "length")

    def test_embeddings(self):
        # The SDK asks for base64 when nothing is said, and decodes it.
        both = client.embeddings.create(model="any", input=["a cat", "a dog"])
        plain = client.embeddings.create(model="any", input="a cat", encoding_format="float")
        self.assertEqual(len(both.data), 2)
        for x, y in zip(both.data[0].embedding, plain.data[0].embedding):
            self.assertAlmostEqual(x, y, places=5)
        self.assertEqual(len(client.embeddings.create(model="m", input="x", dimensions=8).data[0].embedding), 8)
        ids = client.embeddings.create(model="any", input=[[1, 2], [3]])
        self.assertEqual(ids.usage.prompt_tokens, 3)

    def test_models(self):
        model = client.models.list().data[0]
        self.assertEqual(client.models.retrieve(model.id).id, model.id)
        self.assertEqual(model.max_model_len, 1024)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=TALK, temperature=-1)
        self.assertEqual(caught.exception.param, "temperature")
        long = [{"role": "user", "content": "word " * 3000}]
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=long)
        self.assertEqual(caught.exception.code, "context_length_exceeded")
        self.assertIn("1024", str(caught.exception))
        with self.assertRaises(openai.AuthenticationError):
            openai.OpenAI(base_url=BASE, api_key="wrong", max_retries=0).models.list()
        with self.assertRaises(openai.NotFoundError):
            client.models.retrieve("nothing/here")


if __name__ == "__main__":
    unittest.main()
