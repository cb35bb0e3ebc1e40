"""What a model's text means: reasoning, tool calls, content. Pure, one character after another, so that the result
cannot depend on how the text was cut."""
