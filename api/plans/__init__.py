"""What describes or explains a call without running it: `plan`, `explain`, `source`, and what they are asked of."""
