"""Functions of users that convert rows, named in configurations."""


def turns(row):
    return {"messages": [
        {"role": "user", "content": row["question"]["en"]},
        {"role": "assistant", "content": row["answers"][0]},
    ]}


def nothing(row):
    return None


def with_media(row):
    return {**turns(row), "images": []}


def with_column(row):
    return {**turns(row), "source": "web"}
