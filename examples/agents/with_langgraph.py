"""The agent of `apples.py` as a LangGraph of two nodes: the model, and the tools that it calls.

Needs `pip install langgraph langchain-openai`. One program plays one item: the job has no `sessionsPerProgram`.
"""

import json

import tools
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import OpenAI


def main(item: dict) -> None:
    @tool
    def search(query: str) -> str:
        """Search in the notes."""
        return tools.search(item["metadata"]["notes"], query)

    actions = [search, tool(tools.calculate)]
    model = ChatOpenAI(model="policy").bind_tools(actions)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(actions))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    end = graph.compile().invoke({"messages": [("user", item["question"])]})
    right = end["messages"][-1].content.strip() == item["answer"]
    OpenAI().post("/reward", body={"reward": float(right)}, cast_to=object)


if __name__ == "__main__":
    main(json.loads(input()))
