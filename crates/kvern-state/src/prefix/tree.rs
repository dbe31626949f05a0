//! A radix tree over tokens.

use std::collections::BTreeMap;

/// Names an entry.
pub(crate) type Id = u64;

/// Nodes looked at below one point of the path, so that a lookup's time does not grow with the number of entries.
const SEARCH: usize = 256;

/// Entries by their tokens. A node without entry has two children or more, except the root.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    free: Vec<usize>,
}

#[derive(Debug, Default)]
struct Node {
    parent: usize,
    /// Tokens between the parent and this node.
    edge: Vec<u32>,
    /// Tokens from the root.
    depth: usize,
    children: BTreeMap<u32, usize>,
    entry: Option<Id>,
}

fn common(a: &[u32], b: &[u32]) -> usize {
    // Compared in runs first, which is one comparison of memory each.
    const RUN: usize = 64;
    let runs = a.chunks_exact(RUN).zip(b.chunks_exact(RUN)).take_while(|(a, b)| a == b).count() * RUN;
    runs + a[runs..].iter().zip(&b[runs..]).take_while(|(a, b)| a == b).count()
}

impl Tree {
    pub(crate) fn new() -> Self {
        Self { nodes: vec![Node::default()], free: Vec::new() }
    }

    /// Nodes on the way of `tokens` with the tokens that they share with it; the last may share a part of its edge only.
    fn path(&self, tokens: &[u32]) -> Vec<(usize, usize)> {
        let mut path = vec![(0, 0)];
        let (mut node, mut matched) = (0, 0);
        while let Some(&child) = tokens.get(matched).and_then(|first| self.nodes[node].children.get(first)) {
            let edge = &self.nodes[child].edge;
            let shared = common(edge, &tokens[matched..]);
            matched += shared;
            path.push((child, matched));
            if shared < edge.len() {
                break;
            }
            node = child;
        }
        path
    }

    /// The entry with the longest run of tokens in common with `tokens` that `fits`, and that run's length. `fits` is asked whether an
    /// entry, longer or not, can stand for its first so many tokens.
    pub(crate) fn find(&self, tokens: &[u32], mut fits: impl FnMut(Id, usize) -> bool) -> Option<(Id, usize)> {
        let mut done = usize::MAX;
        for (node, shared) in self.path(tokens).into_iter().rev().take_while(|(_, shared)| *shared > 0) {
            let mut open = vec![node];
            for _ in 0..SEARCH {
                let Some(at) = open.pop() else { break };
                if let Some(entry) = self.nodes[at].entry.filter(|&entry| fits(entry, shared)) {
                    return Some((entry, shared));
                }
                open.extend(self.nodes[at].children.values().filter(|&&child| child != done));
            }
            done = node;
        }
        None
    }

    /// Entries whose tokens are the beginning of `tokens`, the longest first.
    pub(crate) fn prefixes(&self, tokens: &[u32]) -> impl Iterator<Item = (Id, usize)> {
        let path = self.path(tokens).into_iter().rev();
        path.filter(|&(node, shared)| shared == self.nodes[node].depth)
            .filter_map(|(node, shared)| self.nodes[node].entry.map(|entry| (entry, shared)))
    }

    /// Sets the entry of exactly `tokens`, and gives the one that was there.
    pub(crate) fn insert(&mut self, tokens: &[u32], entry: Id) -> Option<Id> {
        let (mut node, shared) = self.path(tokens).pop().unwrap_or((0, 0));
        if shared < self.nodes[node].depth {
            node = self.split(node, shared);
        }
        if shared < tokens.len() {
            let leaf = Node { parent: node, edge: tokens[shared..].to_vec(), depth: tokens.len(), ..Node::default() };
            let first = leaf.edge[0];
            let leaf = self.add(leaf);
            self.nodes[node].children.insert(first, leaf);
            node = leaf;
        }
        self.nodes[node].entry.replace(entry)
    }

    /// Removes the entry of exactly `tokens`.
    pub(crate) fn remove(&mut self, tokens: &[u32]) {
        let Some((mut node, shared)) = self.path(tokens).pop() else { return };
        if shared != tokens.len() || shared != self.nodes[node].depth {
            return;
        }
        self.nodes[node].entry = None;
        while node != 0 && self.nodes[node].entry.is_none() && self.nodes[node].children.is_empty() {
            let parent = self.nodes[node].parent;
            let first = self.nodes[node].edge[0];
            self.nodes[parent].children.remove(&first);
            self.nodes[node] = Node::default();
            self.free.push(node);
            node = parent;
        }
        if node != 0 && self.nodes[node].entry.is_none() && self.nodes[node].children.len() == 1 {
            self.join(node);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.nodes[0].children.is_empty() && self.nodes[0].entry.is_none()
    }

    fn add(&mut self, node: Node) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.nodes[at] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() - 1
            }
        }
    }

    /// Puts a node in the middle of the edge above `node`, at `depth` tokens.
    fn split(&mut self, node: usize, depth: usize) -> usize {
        let parent = self.nodes[node].parent;
        let keep = depth - self.nodes[parent].depth;
        let rest = self.nodes[node].edge.split_off(keep);
        let edge = std::mem::replace(&mut self.nodes[node].edge, rest);
        let first = edge[0];
        let mut middle = Node { parent, edge, depth, ..Node::default() };
        middle.children.insert(self.nodes[node].edge[0], node);
        let middle = self.add(middle);
        self.nodes[parent].children.insert(first, middle);
        self.nodes[node].parent = middle;
        middle
    }

    /// Joins a node with its only child.
    fn join(&mut self, node: usize) {
        let Some((_, child)) = self.nodes[node].children.pop_first() else { return };
        let Node { parent, mut edge, .. } = std::mem::take(&mut self.nodes[node]);
        let first = edge[0];
        edge.append(&mut self.nodes[child].edge);
        self.nodes[child].edge = edge;
        self.nodes[child].parent = parent;
        self.nodes[parent].children.insert(first, child);
        self.free.push(node);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a plain list of entries.
        #[test]
        fn finds_what_a_list_would(
            ops in prop::collection::vec((prop::collection::vec(0u32..3, 1..12), any::<bool>()), 1..60),
            wanted in prop::collection::vec(0u32..3, 0..12),
            odd in any::<bool>(),
        ) {
            let (mut tree, mut list) = (Tree::new(), BTreeMap::<Vec<u32>, Id>::new());
            for (id, (tokens, remove)) in ops.into_iter().enumerate() {
                if remove {
                    tree.remove(&tokens);
                    list.remove(&tokens);
                } else {
                    prop_assert_eq!(tree.insert(&tokens, id as Id), list.insert(tokens, id as Id));
                }
            }
            let fits = |id: Id| !odd || id % 2 == 1;
            let best = list.iter().filter(|(_, id)| fits(**id)).map(|(tokens, _)| common(tokens, &wanted)).max();
            let found = tree.find(&wanted, |id, _| fits(id));
            prop_assert_eq!(found.map(|(_, shared)| shared), best.filter(|&shared| shared > 0));
            if let Some((id, shared)) = found {
                let (tokens, _) = list.iter().find(|(_, other)| **other == id).unwrap();
                prop_assert_eq!(common(tokens, &wanted), shared);
            }
            let prefixes: Vec<usize> = tree.prefixes(&wanted).map(|(_, len)| len).collect();
            let want: Vec<usize> =
                list.keys().filter(|tokens| wanted.starts_with(tokens)).map(Vec::len).rev().collect();
            let mut sorted = want.clone();
            sorted.sort_by(|a, b| b.cmp(a));
            prop_assert_eq!(prefixes, sorted);
            for tokens in list.keys() {
                tree.remove(tokens);
            }
            prop_assert!(tree.is_empty());
            prop_assert_eq!(tree.nodes.len(), tree.free.len() + 1, "no node is left behind");
        }
    }
}
