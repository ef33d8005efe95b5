"""Chat templates of ten families, in own words after what the families' templates do.

Each keeps, drops and marks what its family does; nothing else of the originals is here.
"""

_CHATML_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_CHATML_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _OPEN
)
"""Plain turns; neither tools nor reasoning."""

QWEN2 = (
    _CHATML_TOOLS + "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CHATML_CALLS
    + "<|im_end|>\n{% endif %}"
    "{% endfor %}" + _OPEN
)
"""Tools in ChatML; only appends."""

QWEN3 = (
    _CHATML_TOOLS + _LAST_USER + "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    + _CHATML_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + _OPEN
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""Drops reasoning before the last user message; a switch opens answers with empty reasoning."""

DEEPSEEK_R1 = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ (m.content or '').split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call|>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    "<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
"""Opens answers with reasoning that it never shows again; joins arguments as text."""

LLAMA3 = (
    "<bos>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>"
    "{% elif m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Only appends."""

MISTRAL = (
    _LAST_USER + "<bos>{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('a call id has nine letters') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}<eos>"
    "{% elif m.role == 'assistant' %} {{ m.content }}<eos>"
    "{% elif loop.first %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ raise_exception('a system message comes first') }}{% endif %}{% endfor %}"
)
"""Shows the tools before the last user message, so that they move with each question."""

GPT_OSS = (
    _LAST_USER
    + "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.index0 > ns.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""Effort at the top, analysis of the last turn only, and another mark at the very end."""

GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Refuses system messages; only appends, images too."""

GLM = (
    "[gMASK]<sop>"
    + _LAST_USER
    + "{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% if enable_thinking is defined and not enable_thinking %}/nothink{% endif %}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{% endif %}"
    "{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}\n<think></think>{% endif %}"
    "{% endif %}"
)
"""Replaces old reasoning by an empty pair of marks, and marks each question where it is off."""

KEEPS_REASONING = QWEN3.replace(" and loop.index0 > ns.last", "")
"""Keeps all reasoning, as templates of agents' models do."""

FAMILIES = {
    "chatml": CHATML,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "deepseek_r1": DEEPSEEK_R1,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gpt_oss": GPT_OSS,
    "gemma": GEMMA,
    "glm": GLM,
    "keeps_reasoning": KEEPS_REASONING,
}
