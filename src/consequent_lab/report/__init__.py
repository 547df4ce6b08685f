"""From findings to what people look at: one self-contained page, and static figures."""
