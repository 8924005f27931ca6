"""LangChain's chat model and agent, and LangGraph's prebuilt agent."""

from features import run_features
from inputs import QUESTION, Clock, read_clock
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

model = ChatOpenAI(model="scripted")
TOOLS = [tool(read_clock)]


def chat():
    answer = model.invoke(QUESTION)
    assert answer.content == "Hello there."
    again = model.invoke([HumanMessage(QUESTION, name="ada"), answer, HumanMessage("And?")])
    assert (again.content, again.usage_metadata["output_tokens"]) == ("Hello there.", 2)


def stream():
    pieces = [piece.content for piece in model.stream(QUESTION)]
    assert len(pieces) > 2
    assert "".join(pieces) == "Hello there."


def tools():
    for settings in ({}, {"strict": True}, {"tool_choice": "read_clock"}, {"parallel_tool_calls": False}):
        (call,) = model.bind_tools(TOOLS, **settings).invoke(QUESTION).tool_calls
        assert (call["name"], call["args"]) == ("read_clock", {"zone": "noon"})


def agent():
    graph = create_agent(model, TOOLS, system_prompt="Be brief.", checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    for _ in range(2):
        messages = graph.invoke({"messages": [HumanMessage(QUESTION)]}, config)["messages"]
        assert [each.type for each in messages[-4:]] == ["human", "ai", "tool", "ai"]
        assert messages[-1].content == "It is noon."


def streamed_agent():
    graph = create_agent(model, TOOLS)
    parts = list(graph.stream({"messages": [HumanMessage(QUESTION)]}, stream_mode="messages"))
    assert "".join(part.content for part, _ in parts if part.type == "AIMessageChunk") == "It is noon."


def structured_output():
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Clock, method=method).invoke(QUESTION) == Clock(zone="noon")


def structured_agent():
    answer = create_agent(model, [], response_format=Clock).invoke({"messages": [HumanMessage(QUESTION)]})
    assert answer["structured_response"] == Clock(zone="noon")


def responses():
    model = ChatOpenAI(model="scripted", use_responses_api=True)
    assert model.invoke(QUESTION).text == "Hello there."
    assert "".join(piece.text for piece in model.stream(QUESTION)) == "Hello there."
    messages = create_agent(model, TOOLS).invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
    assert messages[-1].text == "It is noon."


run_features(chat, stream, tools, agent, streamed_agent, structured_output, structured_agent, responses)
