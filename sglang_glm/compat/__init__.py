"""Every place where this package enters SGLang. The only package that uses SGLang's private names."""
