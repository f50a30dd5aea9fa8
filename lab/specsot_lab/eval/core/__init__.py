"""What is computed of answers: pure functions of their texts."""
