// The loops over the blocks of one chain in the engine's pool (core/cache/eviction.py, which is the same in Python).
//
// They work on the pool's own tables: dicts, lists and bytes of Python. What they use of CPython's stable interface is
// declared here, so that no headers of Python have to be installed. The caller holds the interpreter's lock.

#include <cstddef>
#include <cstdlib>
#include <cstring>

struct PyObject;

extern "C" {
extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_AssertionError, *PyExc_KeyError;
PyObject* PyErr_NoMemory();
void PyErr_SetString(PyObject*, const char*);
void Py_DecRef(PyObject*);
char* PyByteArray_AsString(PyObject*);
char* PyBytes_AsString(PyObject*);
PyObject* PyBytes_FromStringAndSize(const char*, ptrdiff_t);
ptrdiff_t PyBytes_Size(PyObject*);
PyObject* PyDict_GetItem(PyObject*, PyObject*);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyList_GetItem(PyObject*, ptrdiff_t);
PyObject* PyList_New(ptrdiff_t);
int PyList_SetItem(PyObject*, ptrdiff_t, PyObject*);
ptrdiff_t PyList_Size(PyObject*);
long PyLong_AsLong(PyObject*);
PyObject* PyLong_FromLong(long);
PyObject* PyTuple_GetItem(PyObject*, ptrdiff_t);
int headstart_block_hashes(const char* parent, const char* blocks, long stride, long num, char* hashes);
}

namespace {

constexpr ptrdiff_t HASH_BYTES = 32;
constexpr char HOT = 1, REVIVED = 3;  // core/cache/eviction.py
enum { ID, FIRST, LAST, SIZE };

bool has(PyObject* bytes, const char* content, ptrdiff_t size) {
    return PyBytes_Size(bytes) == size && !std::memcmp(PyBytes_AsString(bytes), content, size_t(size));
}

bool are_equal(PyObject* a, PyObject* b) { return a == b || has(a, PyBytes_AsString(b), PyBytes_Size(b)); }

bool is_published(PyObject* block_hashes, long block) {
    return PyList_GetItem(block_hashes, block) != &_Py_NoneStruct;
}

long at(PyObject* numbers, long index) { return PyLong_AsLong(PyList_GetItem(numbers, index)); }

long add(PyObject* numbers, long index, long difference) {
    const long sum = at(numbers, index) + difference;
    PyList_SetItem(numbers, index, PyLong_FromLong(sum));
    return sum;
}

long failed(PyObject* kind, const char* text) {
    PyErr_SetString(kind, text);
    return -1;
}

void append(int* links, int* list, int block) {
    int *link = links + 3 * block, last = list[LAST];
    link[0] = 0, link[1] = last, link[2] = list[ID];
    (last ? links[3 * last] : list[FIRST]) = block;
    list[LAST] = block;
    list[SIZE]++;
}

bool unlink(int* links, int* order, int block) {
    int *link = links + 3 * block, *list = link[2] == order[ID] ? order : order + 4;
    if (link[2] != list[ID]) return false;
    (link[1] ? links[3 * link[1]] : list[FIRST]) = link[0];
    (link[0] ? links[3 * link[0] + 1] : list[LAST]) = link[1];
    list[SIZE]--;
    link[2] = 0;
    return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT PyObject* headstart_hash_chain(PyObject* parent, PyObject* raw, long stride) {
    const char *before = PyBytes_AsString(parent), *blocks = PyBytes_AsString(raw);
    if (!before || !blocks) return nullptr;  // not bytes: there is an exception
    const long num = long(PyBytes_Size(raw)) / stride;
    PyObject* list = PyList_New(num);
    auto* hashes = static_cast<char*>(std::malloc(size_t(num * HASH_BYTES + 1)));
    const bool is_done = list && hashes && headstart_block_hashes(before, blocks, stride, num, hashes);
    for (long i = 0; is_done && i < num; i++)
        PyList_SetItem(list, i, PyBytes_FromStringAndSize(hashes + i * HASH_BYTES, HASH_BYTES));
    std::free(hashes);
    return is_done ? list : PyErr_NoMemory();
}

EXPORT PyObject* headstart_find(PyObject* entries, PyObject* block_hashes, PyObject* root, PyObject* tokens, long stride) {
    const ptrdiff_t num = PyList_Size(block_hashes), size = PyBytes_Size(tokens);
    const char* content = PyBytes_AsString(tokens);
    PyObject *found = PyList_New(0), *parent = root;
    for (ptrdiff_t i = 0; found && i < num; i++) {
        PyObject* block_hash = PyList_GetItem(block_hashes, i);
        PyObject* entry = PyDict_GetItem(entries, block_hash);
        if (!entry || (i + 1) * stride > size || !are_equal(PyTuple_GetItem(entry, 1), parent)) break;
        if (!has(PyTuple_GetItem(entry, 2), content + i * stride, stride)) break;
        PyList_Append(found, PyTuple_GetItem(entry, 0));
        parent = block_hash;
    }
    return found;
}

EXPORT long headstart_hold(PyObject* refs, PyObject* published, const int* blocks, long num, int* unused) {
    long num_unused = 0;
    for (long i = 0; i < num; i++) {
        if (!is_published(published, blocks[i])) return failed(PyExc_AssertionError, "a block is not published and cannot be shared");
        if (add(refs, blocks[i], 1) == 1) unused[num_unused++] = blocks[i];
    }
    return num_unused;
}

// Writes the blocks that are idle now to freed[0...], those that others hold to freed[num...], both tails first. Returns
// how many are idle, and leaves how many are held in freed[2 * num].
EXPORT long headstart_drop(PyObject* refs, PyObject* published, PyObject* scratch, const int* blocks, long num,
                           int* freed) {
    long num_idle = 0, num_held = 0;
    for (long i = num - 1; i >= 0; i--) {
        const long count = add(refs, blocks[i], -1);
        if (count < 0) return failed(PyExc_AssertionError, "a block is released twice");
        if (is_published(published, blocks[i])) freed[count ? num + num_held++ : num_idle++] = blocks[i];
        else if (!count) {
            PyObject* number = PyLong_FromLong(blocks[i]);
            PyList_Append(scratch, number);
            Py_DecRef(number);
        }
    }
    freed[2 * num] = int(num_held);
    return num_idle;
}

// Orders 2q. `links`: three numbers for each block of the pool: the blocks after and before it in its list, and the list.
// `order`: two lists (on probation, protected) of four numbers each: its id, first block, last block, number of blocks.
// Block 0 is none.

EXPORT long headstart_order_add(PyObject* marks, int* links, int* order, const int* blocks, long num, long hot,
                                long max_protected) {
    char* mark = PyByteArray_AsString(marks);
    for (long i = 0; i < num; i++) {
        if (mark[blocks[i]] & HOT) hot = HOT;
        mark[blocks[i]] |= char(hot);
        append(links, order + 4 * hot, blocks[i]);
    }
    while (order[4 + SIZE] > max_protected) {
        const int block = order[4 + FIRST];
        unlink(links, order, block);
        mark[block] &= char(~HOT);
        append(links, order, block);
    }
    return hot;
}

EXPORT long headstart_order_remove(int* links, int* order, const int* blocks, long num, PyObject* revived) {
    char* mark = revived == &_Py_NoneStruct ? nullptr : PyByteArray_AsString(revived);
    for (long i = 0; i < num; i++) {
        if (!unlink(links, order, blocks[i])) return failed(PyExc_KeyError, "a block is not in this order");
        if (mark) mark[blocks[i]] = REVIVED;
    }
    return 0;
}
