"""Intent recognition: made-up sentences, and the accuracy of the bundled model with and without prefix caching."""
