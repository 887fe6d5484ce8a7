"""The Responses API: requests, stored responses, answers and their event streams.

fields -> request, tools, input_items -> conversation -> ChatPrompt, GenerationParams
events of the engine -> output_items -> output_recorder -> answer (an object or an event stream)
answer -> store -> the conversation of the next request
"""
